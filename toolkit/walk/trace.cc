// SPDX-License-Identifier: Apache-2.0
#include "walk/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "core/batch.hpp"
#include "core/split.hpp"
#include "tessera/error.hpp"

namespace tessera::walk {
namespace {

void expect_within(const char* what, std::int64_t index, std::int64_t count) {
    if (index >= 0 && index < count) return;
    throw Error(ErrorCode::invalid_argument, what, fmt::format("expected 0..{}, got {}", count - 1, index));
}

/// Transposes [n, lanes] to rows [queries, n].
Matrix transposed(const float* lanes_first, std::int64_t n, std::int64_t lanes, std::int64_t queries) {
    if (lanes_first == nullptr) return {};
    Matrix result{queries, n, std::vector<float>(static_cast<std::size_t>(queries * n))};
    for (std::int64_t q = 0; q < queries; ++q) {
        for (std::int64_t i = 0; i < n; ++i) {
            result.values[static_cast<std::size_t>(q * n + i)] = lanes_first[i * lanes + q];
        }
    }
    return result;
}

Matrix copied(const float* rows, std::int64_t count, std::int64_t columns, std::int64_t stride) {
    if (rows == nullptr) return {};
    Matrix result{count, columns, {}};
    for (std::int64_t r = 0; r < count; ++r)
        result.values.insert(result.values.end(), rows + r * stride, rows + r * stride + columns);
    return result;
}

std::vector<float> copied(const float* values, std::int64_t count) {
    return values == nullptr ? std::vector<float>{} : std::vector<float>(values, values + count);
}

/// Copies the values that the kernel reports for one tile of queries.
class Recorder : public TileObserver {
 public:
    Recorder(Trace& trace, const Sequence& sequence) : trace_(trace) {
        trace.len_q = sequence.len_q;
        trace.len_kv = sequence.len_kv;
        const std::int64_t block = std::min(trace.plan.tile.block_q, sequence.len_q);
        const std::int64_t first = trace.selection.row / block * block;
        trace.queries = {first, std::min(sequence.len_q, first + block)};
    }

    void saw(const TileReport& report) override {
        const Selection& at = trace_.selection;
        if (report.batch != at.batch || report.query_head != at.head) return;
        if (report.queries.begin > at.row || report.queries.end <= at.row) return;
        const std::scoped_lock lock(mutex_);
        if (!(report.queries == trace_.queries)) {
            throw Error(
                ErrorCode::internal, "walk",
                fmt::format("expected the tile of queries {}..{}, got {}..{} from the kernel", trace_.queries.begin,
                            trace_.queries.end, report.queries.begin, report.queries.end));
        }
        record(report);
    }

 private:
    void record(const TileReport& r) {
        const Problem& p = trace_.plan.problem;
        const std::int64_t queries = trace_.queries.size();
        const std::int64_t keys = r.keys.size();
        Step step{.step = r.step, .coverage = r.coverage, .keys = r.keys};
        step.m = copied(r.m, queries);
        step.l = copied(r.l, queries);
        step.rescale = copied(r.rescale, queries);
        step.o = transposed(r.o, p.head_dim_v, r.lanes, queries);
        step.s = transposed(r.s, keys, r.lanes, queries);
        step.p = transposed(r.p, keys, r.lanes, queries);
        step.ds = transposed(r.ds, keys, r.lanes, queries);
        step.dq = transposed(r.dq, p.head_dim, r.lanes, queries);
        step.dk = copied(r.dk, keys, p.head_dim, r.dk_stride);
        step.dv = copied(r.dv, keys, p.head_dim_v, r.dv_stride);
        if (r.lse != nullptr) trace_.lse = copied(r.lse, queries);
        if (r.delta != nullptr) trace_.delta = copied(r.delta, queries);
        trace_.steps.push_back(std::move(step));
    }

    Trace& trace_;
    std::mutex mutex_;
};

/// Returns the first kind of step that processes each tile of keys once.
TileStep sweep_of(const Trace& trace) {
    if (trace.plan.pass == Pass::forward) {
        return trace.plan.kernel->schedule == Schedule::standard ? TileStep::scores : TileStep::values;
    }
    return trace.plan.kernel->schedule == Schedule::standard ? TileStep::weights : TileStep::gradients;
}

/// Returns all tiles of keys of this kernel.
std::vector<Range> key_tiles(const Trace& trace) {
    const KernelInfo& kernel = *trace.plan.kernel;
    const bool is_split = kernel.schedule == Schedule::fa2 && kernel.pass == Pass::forward;
    const std::int64_t chunk = is_split ? kSplitKeys : std::max<std::int64_t>(1, trace.len_kv);
    const std::int64_t block = std::max<std::int64_t>(1, std::min(trace.plan.tile.block_kv, trace.len_kv));
    std::vector<Range> tiles;
    for (std::int64_t first = 0; first < trace.len_kv; first = tiles.back().end) {
        const std::int64_t end_of_chunk = (first / chunk + 1) * chunk;
        tiles.push_back({first, std::min({trace.len_kv, first + block, end_of_chunk})});
    }
    return tiles;
}

/// Inserts the tiles that the kernel skipped among the steps that process each tile of keys once. Each goes before the
/// first step with larger keys, or after the last step.
void add_skipped(Trace& trace) {
    std::vector<Step>& steps = trace.steps;
    const TileStep sweep = sweep_of(trace);
    const auto touched = [&](const Step& s) { return s.step == sweep && s.coverage != Coverage::empty; };
    for (const Range& keys : key_tiles(trace)) {
        const auto has_keys = [&](const Step& s) { return touched(s) && s.keys.begin == keys.begin; };
        if (std::any_of(steps.begin(), steps.end(), has_keys)) continue;
        auto at = std::find_if(steps.begin(), steps.end(),
                               [&](const Step& s) { return touched(s) && s.keys.begin > keys.begin; });
        if (at == steps.end()) {
            const auto last =
                std::find_if(steps.rbegin(), steps.rend(), [&](const Step& s) { return s.step == sweep; });
            at = last.base();
        }
        Step skipped{.step = sweep, .coverage = Coverage::empty};
        skipped.keys = keys;
        steps.insert(at, std::move(skipped));
    }
}

/// True if some query of the tile sees a key.
bool touches_keys(const Trace& trace) {
    const Band band = trace.plan.problem.mask.bind(trace.len_q, trace.len_kv);
    return !band.kv_range(trace.queries.begin, trace.queries.end).empty();
}

void add_traffic(Trace& trace) {
    TrafficCount count(trace.plan, trace.queries, trace.len_q, trace.len_kv);
    Traffic so_far;
    std::size_t last = 0;  // last step that ran
    for (std::size_t i = 0; i < trace.steps.size(); ++i) {
        Step& step = trace.steps[i];
        if (step.coverage != Coverage::empty) so_far = count.after(step.step, step.keys), last = i;
        step.moved = so_far;
    }
    trace.moved = count.moved();
    if (trace.plan.pass == Pass::forward) return;
    so_far = count.after_backward();
    for (std::size_t i = last; i < trace.steps.size(); ++i) trace.steps[i].moved = so_far;
}

template <class Args>
Sequence selected_sequence(const Plan& plan, const Args& args, const Selection& selection) {
    if (plan.kernel == nullptr || plan.kernel->backend != Backend::cpu) {
        throw Error(ErrorCode::invalid_argument, "plan",
                    "expected a plan of a CPU kernel, because only CPU kernels report their steps");
    }
    if (plan.threads != 1) {
        throw Error(ErrorCode::invalid_argument, "threads", fmt::format("expected 1, got {}", plan.threads));
    }
    const Problem& p = plan.problem;
    expect_within("batch", selection.batch, p.batch);
    expect_within("head", selection.head, p.heads_q);
    const Sequence sequence = sequence_of(p, args, selection.batch);
    expect_within("row", selection.row, sequence.len_q);
    return sequence;
}

template <class Args, class Run>
Trace traced(const Plan& plan, const Args& args, const Selection& selection, Execution how, const Run& run) {
    const Sequence sequence = selected_sequence(plan, args, selection);
    Trace trace{.plan = plan, .selection = selection};
    Recorder recorder(trace, sequence);
    how.observer = &recorder;
    const Workspace workspace(plan);
    run(plan, args, workspace, how);
    if (trace.steps.empty() && touches_keys(trace)) {
        throw Error(
            ErrorCode::unsupported, plan.kernel->name,
            fmt::format("reports no steps when it computes {} this way; in fp32 it does", name_of(plan.problem.dtype)));
    }
    add_skipped(trace);
    add_traffic(trace);
    return trace;
}

}  // namespace

std::int64_t Trace::count(Coverage coverage) const {
    const TileStep sweep = sweep_of(*this);
    return std::count_if(steps.begin(), steps.end(),
                         [&](const Step& s) { return s.step == sweep && s.coverage == coverage; });
}

std::string describe_run(const Plan& plan) {
    constexpr const char* kHere = "the SIMD path (cpu/simd): fp32, one query per lane";
    if (plan.matrix_unit.empty()) return fmt::format("{}; a call without an observer runs the same path", kHere);
    return fmt::format(
        "{}; a call without an observer runs ANOTHER path with other bits: the matrix path (cpu/matrix), bf16 tiles on "
        "{}",
        kHere, plan.matrix_unit);
}

Trace trace_forward(const Plan& plan, const ForwardArgs& args, const Selection& selection, const Execution& how) {
    return traced(
        plan, args, selection, how,
        [](const Plan& p, const ForwardArgs& a, const Workspace& w, const Execution& h) { forward(p, a, w, h); });
}

Trace trace_backward(const Plan& plan, const BackwardArgs& args, const Selection& selection, const Execution& how) {
    return traced(
        plan, args, selection, how,
        [](const Plan& p, const BackwardArgs& a, const Workspace& w, const Execution& h) { backward(p, a, w, h); });
}

}  // namespace tessera::walk
