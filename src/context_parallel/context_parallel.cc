// SPDX-License-Identifier: Apache-2.0
//
// context_parallel(): all ranks compare their arguments, and then this rank makes its plan.
#include "tessera/context_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "context_parallel/agree.hpp"
#include "context_parallel/host_rows.hpp"
#include "context_parallel/state.hpp"
#include "core/arguments.hpp"
#include "core/invalid.hpp"
#include "registry.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

using namespace ranks;

/// The rows of the whole sequence. Throws for Problems that are not attention of one sequence to itself.
std::int64_t checked_total(const Problem& p, const ContextParallelOptions& options) {
    p.validate();
    const auto refuse = [](const char* option) {
        throw Error(ErrorCode::unsupported, "whole", fmt::format("takes no {} over ranks", option));
    };
    if (p.dropout.probability > 0) refuse("dropout");
    for (const TensorArgument<ForwardArgs>& tensor : kTensors<ForwardArgs>) {
        const bool documents = tensor.option.exists() && std::string_view(tensor.option.name) == "ragged";
        if (tensor.option.exists() && !documents && tensor.option.is_set(p)) refuse(tensor.option.name);
    }
    const std::int64_t rows_q = p.ragged ? p.total_q : p.len_q, rows_kv = p.ragged ? p.total_kv : p.len_kv;
    if (rows_q != rows_kv)
        invalid("whole", fmt::format("expected as many keys as queries, got {} and {}", rows_kv, rows_q));
    const auto given = static_cast<std::int64_t>(options.cu_seqlens.size());
    if (given != (p.ragged ? p.batch + 1 : 0))
        invalid("cu_seqlens", fmt::format("expected {} offsets, got {}", p.ragged ? p.batch + 1 : 0, given));
    std::int64_t before = 0;
    for (const std::int64_t offset : options.cu_seqlens) {
        if (offset < before || offset > rows_q || (before == 0 && &offset == options.cu_seqlens.data() && offset != 0))
            invalid("cu_seqlens",
                    fmt::format("expected offsets that begin at 0, never decrease and are at most {}, got {}", rows_q,
                                offset));
        before = offset;
    }
    if (options.steps < 0) invalid("steps", fmt::format("expected 0 or more, got {}", options.steps));
    if (options.gradient_blocks < 0)
        invalid("gradient_blocks", fmt::format("expected 0 or more, got {}", options.gradient_blocks));
    return rows_q;
}

std::string digest(std::span<const std::int64_t> values) {
    std::uint64_t hash = 14695981039346656037u;  // FNV-1a
    for (const std::int64_t value : values) hash = (hash ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
    return fmt::format("{} values {:016x}", values.size(), hash);
}

/// The arguments that all ranks must give alike.
Fields fields_of(const Problem& whole, const ContextParallelOptions& options, const std::string& error) {
    const Mask& mask = whole.mask;
    return {{"error", error},
            {"whole", whole.describe()},
            {"mask", fmt::format("{} {} {}", static_cast<int>(mask.causal), mask.window_left, mask.window_right)},
            {"scale", fmt::format("{}", whole.effective_scale())},
            {"softcap", fmt::format("{}", whole.softcap)},
            {"order", fmt::format("{}", static_cast<int>(options.order))},
            {"permutation", digest(options.permutation)},
            {"cu_seqlens", digest(options.cu_seqlens)},
            {"gradient_blocks", fmt::format("{}", options.gradient_blocks)},
            {"steps", fmt::format("{}", options.steps)},
            {"device", options.device.type == DeviceType::cuda ? "cuda" : "cpu"},
            {"forward_kernel", options.forward_kernel},
            {"backward_kernel", options.backward_kernel}};
}

/// By the bytes of a rank's K and V: more steps hide more of the exchange and need less memory, and make smaller calls,
/// which cost more backward. Measured on two H200 (docs/context-parallel.md).
std::int64_t steps_for(std::int64_t bytes, Pass pass) {
    constexpr std::int64_t kMiB = 1 << 20;
    if (pass == Pass::forward) return bytes >= 256 * kMiB ? 8 : bytes >= 64 * kMiB ? 4 : bytes >= 16 * kMiB ? 2 : 1;
    return bytes >= 512 * kMiB ? 8 : bytes >= 256 * kMiB ? 4 : 1;
}

std::vector<Step> steps_of(const Problem& whole, const ContextParallelOptions& options, std::int64_t rows, Pass pass) {
    const std::int64_t bytes = rows * whole.heads_kv * (whole.head_dim + whole.head_dim_v) * size_of(whole.dtype);
    std::int64_t count = options.steps;
    if (count == 0) count = options.device.type == DeviceType::cuda ? steps_for(bytes, pass) : 1;
    if (options.steps == 0 && count > 1 && count <= 4 && pass == Pass::forward && whole.heads_kv >= 8) {
        // The first exchange is not hidden, so it is small, and each step hides that of a larger one.
        const std::int64_t heads = whole.heads_kv;
        return {{0, heads / 8}, {heads / 8, heads * 3 / 8}, {heads * 3 / 8, heads}};
    }
    count = std::clamp<std::int64_t>(count, 1, std::max<std::int64_t>(whole.heads_kv, 1));
    std::vector<Step> steps;
    for (std::int64_t i = 0; i < count; ++i)
        steps.push_back({whole.heads_kv * i / count, whole.heads_kv * (i + 1) / count});
    return steps;
}

/// Makes the State of this rank.
class Planner {
 public:
    Planner(const Problem& whole, const ContextParallelOptions& options, ContextParallel::State& state)
        : options_(options), state_(state) {
        state.whole = whole;
        state.total = checked_total(whole, options);
        const int ranks = state.communicator->ranks();
        rank_ = state.communicator->rank();
        const std::vector<std::int64_t> positions =
            positions_of(options.order, options.permutation, state.total, ranks);
        state.rows = state.total / ranks;
        state.batch = whole.ragged ? 1 : whole.batch;
        state.positions.assign(positions.begin() + rank_ * state.rows, positions.begin() + (rank_ + 1) * state.rows);
        pieces_ = pieces_of(positions, ranks);
        std::copy_if(pieces_.begin(), pieces_.end(), std::back_inserter(state.pieces),
                     [&](const Piece& piece) { return piece.rank == rank_; });
        for (const Pass pass : {Pass::forward, Pass::backward})
            state.steps[static_cast<int>(pass)] = steps_of(whole, options, state.rows, pass);
        LayoutOptions layout{.total = state.total,
                             .offsets = {options.cu_seqlens.begin(), options.cu_seqlens.end()},
                             .mask = whole.mask,
                             .blocks = 0,
                             .documents = whole.ragged};
        if (!whole.ragged) layout.offsets = {0, state.total};
        const std::vector<SegmentCall> calls = calls_of(pieces_, layout);
        layout.blocks = options.gradient_blocks;
        const std::vector<SegmentCall> finer = layout.blocks > 0 ? calls_of(pieces_, layout) : calls;
        for (const SegmentCall& call : calls_of_rank(calls, rank_)) add_call(Pass::forward, call);
        for (const SegmentCall& call : calls_of_rank(finer, rank_)) add_call(Pass::backward, call);
        exchange_keys(key_transfers(pieces_, calls));
        exchange_gradients(gradient_transfers(pieces_, finer));
    }

 private:
    /// Lengths of the sequences of a ragged call: those of its segments, and of the keys between them.
    struct Lengths {
        std::vector<std::int32_t> q{0}, kv{0};  // offsets
        std::int64_t longest_q = 0, longest_kv = 0;

        void add(std::int64_t rows, std::int64_t keys) {
            q.push_back(q.back() + static_cast<std::int32_t>(rows));
            kv.push_back(kv.back() + static_cast<std::int32_t>(keys));
            longest_q = std::max(longest_q, rows);
            longest_kv = std::max(longest_kv, keys);
        }
    };

    static Lengths lengths_of(const SegmentCall& call) {
        Lengths lengths;
        std::int64_t at = call.keys().begin;
        for (const Segment& segment : call.segments) {
            if (segment.keys.begin > at) lengths.add(0, segment.keys.begin - at);
            lengths.add(segment.rows, segment.keys.size());
            at = segment.keys.end;
        }
        return lengths;
    }

    /// The Problem of a call with all key heads.
    Problem problem_of(const SegmentCall& call, const Lengths& lengths) const {
        Problem p = state_.whole;
        p.len_q = call.rows();
        p.len_kv = call.keys().size();
        if (p.ragged) {
            p.batch = static_cast<std::int64_t>(lengths.q.size()) - 1;
            p.total_q = call.rows();
            p.total_kv = call.keys().size();
            p.len_q = lengths.longest_q;
            p.len_kv = lengths.longest_kv;
        }
        if (p.mask.causal != Causal::none) {
            p.mask.causal = Causal::bottom_right;  // one mask in the whole, which is square
            p.mask.window_right = unbounded;
            return p;
        }
        // The diagonal of a call ends in the corner of its last query and last key.
        if (p.mask.window_left != unbounded) p.mask.window_left += call.shift();
        if (p.mask.window_right != unbounded) p.mask.window_right -= call.shift();
        return p;
    }

    void add_call(Pass pass, const SegmentCall& call) {
        PlannedCall planned{.call = call};
        const Lengths lengths = lengths_of(call);
        Problem problem = problem_of(call, lengths);
        PlanOptions how{.pass = pass,
                        .kernel = pass == Pass::forward ? options_.forward_kernel : options_.backward_kernel,
                        .threads = options_.threads,
                        .device = options_.device};
        const std::int64_t group = state_.whole.group();
        for (const Step& step : state_.steps_of(pass)) {
            problem.heads_kv = step.heads();
            problem.heads_q = step.heads() * group;
            if (!planned.plans.contains(step.heads())) planned.plans.emplace(step.heads(), plan(problem, how));
        }
        if (state_.whole.ragged) {
            planned.cu_seqlens_q = on_device(lengths.q);
            planned.cu_seqlens_kv = on_device(lengths.kv);
        }
        state_.calls[static_cast<int>(pass)].push_back(std::move(planned));
    }

    template <class T>
    T* uploaded(const std::vector<T>& values) {
        const std::size_t bytes = values.size() * sizeof(T);
        auto* memory = static_cast<T*>(state_.memory->allocate(std::max<std::size_t>(bytes, sizeof(T))));
        state_.memory->write(memory, values.data(), bytes);
        return memory;
    }

    TensorView on_device(const std::vector<std::int32_t>& offsets) {
        return dense_view(uploaded(offsets), DType::int32, {static_cast<std::int64_t>(offsets.size())},
                          options_.device);
    }

    void exchange_keys(const std::vector<KeyTransfer>& transfers) {
        for (const KeyTransfer& t : transfers) {
            for (std::int64_t b = 0; b < state_.batch; ++b) {
                const std::int64_t row = b * state_.total + t.start;
                if (t.from == rank_) state_.sent.push_back({t.to, row, t.length});
                if (t.to == rank_) state_.received.push_back({t.from, row, t.length});
            }
        }
    }

    void exchange_gradients(std::vector<GradientTransfer> transfers) {
        std::int64_t end = 0;
        for (PlannedCall& planned : state_.calls[static_cast<int>(Pass::backward)]) {
            planned.parts = end;
            end += state_.batch * planned.call.keys().size();
        }
        // Sums are in the order of the segments' rows, whichever rank computed them.
        struct Part {
            std::int64_t segment, row, length, source;
        };
        std::vector<Part> parts;
        for (const GradientTransfer& t : transfers) {
            for (std::int64_t b = 0; b < state_.batch; ++b) {
                std::int64_t source = end;
                if (t.from == rank_) {
                    const PlannedCall& made = state_.calls[static_cast<int>(Pass::backward)][t.call];
                    const Range keys = made.call.keys();
                    source = made.parts + b * keys.size() + t.start - keys.begin;
                    if (t.to != rank_) state_.parts_sent.push_back({t.to, source, t.length});
                } else if (t.to == rank_) {
                    state_.parts_received.push_back({t.from, source, t.length});
                    end += t.length;
                }
                if (t.to == rank_) parts.push_back({t.segment, b * state_.rows + t.row, t.length, source});
            }
        }
        state_.parts = end;
        std::stable_sort(parts.begin(), parts.end(),
                         [](const Part& a, const Part& b) { return a.segment < b.segment; });
        std::vector<std::int64_t> first(static_cast<std::size_t>(state_.batch * state_.rows) + 1, 0);
        for (const Part& part : parts) {
            for (std::int64_t i = 0; i < part.length; ++i) ++first[static_cast<std::size_t>(part.row + i) + 1];
        }
        for (std::size_t row = 1; row < first.size(); ++row) first[row] += first[row - 1];
        std::vector<std::int64_t> sources(static_cast<std::size_t>(first.back())), next(first);
        for (const Part& part : parts) {
            for (std::int64_t i = 0; i < part.length; ++i)
                sources[static_cast<std::size_t>(next[static_cast<std::size_t>(part.row + i)]++)] = part.source + i;
        }
        state_.sums = uploaded(first);
        state_.sources = uploaded(sources);
    }

    const ContextParallelOptions& options_;
    ContextParallel::State& state_;
    int rank_ = 0;
    std::vector<Piece> pieces_;  // of all ranks
};

}  // namespace

std::int64_t ContextParallel::State::widest_step(Pass pass) const {
    std::int64_t most = 0;
    for (const Step& step : steps_of(pass)) most = std::max(most, step.heads());
    return most;
}

std::size_t ContextParallel::State::kernel_bytes(Pass pass) const {
    std::size_t most = 0;
    for (const PlannedCall& planned : calls[static_cast<int>(pass)]) {
        for (const auto& [heads, plan] : planned.plans) most = std::max(most, plan.workspace_bytes);
    }
    return most;
}

ContextParallel context_parallel(const Problem& whole, Communicator& communicator,
                                 const ContextParallelOptions& options) {
    auto state = std::make_unique<ContextParallel::State>();
    state->communicator = &communicator;
    state->device = options.device;
    // Without memory of the device no message can be sent, so an error here is this rank's alone.
    state->memory = options.device.type == DeviceType::cuda ? rows_on_cuda(options.device) : host_rows();
    std::optional<Error> refused;
    try {
        const Planner planner(whole, options, *state);
    } catch (const Error& error) {
        refused = error;
    }
    try {
        agree(fields_of(whole, options, refused ? refused->what() : ""), communicator, *state->memory);
    } catch (const Error&) {
        if (!refused) throw;
    }
    if (refused) throw *refused;
    return ContextParallel(std::move(state));
}

ContextParallel::ContextParallel(std::unique_ptr<State> state) : state_(std::move(state)) {}
ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel& ContextParallel::operator=(ContextParallel&&) noexcept = default;
ContextParallel::~ContextParallel() = default;

std::span<const std::int64_t> ContextParallel::positions() const { return state_->positions; }

}  // namespace tessera
