// SPDX-License-Identifier: Apache-2.0
#include "diagnose/diagnosis.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "diagnose/by_hand.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/kernel_text.hpp"
#include "diagnose/op_tree.hpp"
#include "diagnose/repeats.hpp"
#include "diagnose/step_shares.hpp"

namespace tessera::diagnose {
namespace {

constexpr const char* kMathOp = "aten::_scaled_dot_product_attention_math";
constexpr std::size_t kMostShapes = 512;  // per kind
constexpr std::size_t kMostKinds = 4096;
constexpr std::size_t kMostTimes = 4'000'000;  // 16 MB

/// The properties that make two calls the same kind, besides the kernel: all of the inputs except lengths, batch and
/// heads.
std::string kind_of(const Call& call) {
    Call same = call;
    for (Operand* operand : {&same.q, &same.k, &same.v}) {
        if (operand->shape && operand->shape->size() == 4) operand->shape = Sizes{0, 0, 0, operand->shape->back()};
    }
    return text_of(same);
}

std::string joined(const std::vector<std::string>& parts) {
    std::string text;
    for (const std::string& part : parts) text += part + "|";
    return text;
}

/// True if the kernel is code that Inductor fused, not a template: "triton_per_fused__softmax_2".
bool by_inductor(std::string_view kernel) {
    return begins_any(kernel, {"triton_per_fused", "triton_red_fused", "triton_poi_fused"});
}

class Sorter {
 public:
    explicit Sorter(Trace& trace) : trace_(trace), tree_(trace), repeats_(trace, tree_) {
        for (std::size_t i = 0; i < trace.kernels.size(); ++i)
            readings_.push_back(read_name(trace.kernels[static_cast<std::uint32_t>(i)]));
        taken_.assign(trace.runs.size(), false);
    }

    Diagnosis sorted() {
        link();
        take_attention();
        take_math();
        if (trace_.ordered) take_by_hand();
        take_residual();
        return finished();
    }

 private:
    using KindKey = std::tuple<std::string, std::string, std::string>;  // kernel, operator, inputs

    const NameReading& reading(std::uint32_t run) const { return readings_[trace_.runs[run].name]; }

    void link() {
        std::int64_t linked = 0;
        for (std::size_t i = 0; i < trace_.runs.size(); ++i) {
            const KernelRun& run = trace_.runs[i];
            const std::int64_t op = tree_.launched_by(i);
            ops_.push_back(op);
            roots_.push_back(tree_.attention_around(op));
            linked += op != OpTree::kNone ? 1 : 0;
            diagnosis_.runs += run.count;
            diagnosis_.gpu_us += run.us;
        }
        if (!trace_.runs.empty())
            diagnosis_.linked = static_cast<double>(linked) / static_cast<double>(trace_.runs.size());
    }

    /// The call that an operator's own inputs describe; it is parsed once for all operators with equal inputs.
    const std::optional<Call>& inputs_of(std::int64_t op) {
        static const std::optional<Call> kNone;
        if (op == OpTree::kNone || tree_.run(op).inputs == Texts::kLost) return kNone;
        const auto key = std::pair(tree_.run(op).name, tree_.run(op).inputs);
        const auto [entry, is_new] = calls_.try_emplace(key);
        if (is_new) entry->second = call_of_inputs(tree_.name(op), tree_.inputs(op));
        return entry->second;
    }

    /// The call behind the operator that launched a run, from the outermost operator around it that describes one.
    /// Those that say whether it is causal come first: a node of autograd around an operator has shapes alone.
    const std::optional<Call>& call_of(std::int64_t op) {
        const std::int64_t whole =
            tree_.outermost(op, [&](std::int64_t around) { return inputs_of(around) && inputs_of(around)->is_causal; });
        if (whole != OpTree::kNone) return inputs_of(whole);
        return inputs_of(tree_.outermost(op, [&](std::int64_t around) { return inputs_of(around).has_value(); }));
    }

    std::size_t kind_with(const NameReading& r, std::int64_t op, const std::optional<Call>& call) {
        KindKey key{std::string(name_of(r.family)) + "|" + r.library + "|" + r.release + "|" + name_of(r.pass) + "|" +
                        r.mask + "|" + std::to_string(r.arch) + "|" + std::to_string(r.head_dim) + "|" +
                        std::to_string(r.tile_q) + "|" + std::to_string(r.tile_kv) + "|" + joined(r.features) +
                        (r.role == Role::helper ? "helper" : ""),
                    op == OpTree::kNone ? "" : tree_.name(op), call ? kind_of(*call) : ""};
        const auto found = kinds_.find(key);
        if (found != kinds_.end()) return found->second;
        if (diagnosis_.kinds.size() >= kMostKinds) return kMostKinds - 1;
        AttentionKind kind;
        kind.reading = r;
        kind.asked_by = std::get<1>(key);
        diagnosis_.kinds.push_back(kind);
        sums_.emplace_back();
        shapes_.emplace_back();
        times_.emplace_back();
        host_times_.emplace_back();
        return kinds_.emplace(std::move(key), diagnosis_.kinds.size() - 1).first->second;
    }

    void add(std::size_t kind, std::uint32_t run, bool beside) {
        const KernelRun& r = trace_.runs[run];
        AttentionKind& k = diagnosis_.kinds[kind];
        k.us += r.us;
        if (beside) k.beside_us += r.us;
        KernelSum& sum = sums_[kind][r.name];
        sum.count += r.count;
        sum.us += r.us;
        taken_[run] = true;
    }

    /// Adds calls of `us` in all. `whole`: it is one run of the kernel that computes the call, or all of one by hand.
    void add_call(std::size_t kind, const std::optional<Call>& call, std::int64_t count, double us, bool whole) {
        diagnosis_.kinds[kind].calls += count;
        const std::string text = call ? text_of(*call) : "";
        if (whole && count == 1 && trace_.timed && ++kept_times_ < kMostTimes)
            times_[kind][text].push_back(static_cast<float>(us));
        if (!call) return;
        auto& shapes = shapes_[kind];
        if (shapes.size() >= kMostShapes && shapes.count(text) == 0) return;
        ShapeSum& sum = shapes[text];
        if (sum.count == 0) sum.call = *call;
        sum.count += count;
        sum.us += us;
    }

    void take_attention() {
        for (std::uint32_t i = 0; i < trace_.runs.size(); ++i) {
            if (reading(i).role != Role::attention || tree_.inside(ops_[i], kMathOp)) continue;
            const std::int64_t root = roots_[i];
            const std::optional<Call>& call = call_of(ops_[i]);
            const std::size_t kind = kind_with(reading(i), root, call);
            add(kind, i, false);
            add_call(kind, call, trace_.runs[i].count, trace_.runs[i].us, true);
            if (root == OpTree::kNone || !kind_of_root_.insert_or_assign(root, kind).second) continue;
            host_times_[kind].push_back(static_cast<float>(tree_.run(root).end_us - tree_.run(root).start_us));
            repeats_.note(diagnosis_.kinds[kind].repeats, root, call);
        }
    }

    void take_math() {
        for (std::uint32_t i = 0; i < trace_.runs.size(); ++i) {
            if (taken_[i] || !tree_.inside(ops_[i], kMathOp)) continue;
            const std::int64_t root = roots_[i];
            const std::optional<Call>& call = call_of(ops_[i]);
            NameReading math = standard_attention(Family::math, KernelPass::forward, Confidence::certain);
            math.library = "PyTorch";
            math.evidence.push_back(std::string("launched within the operator ") + kMathOp);
            const std::size_t kind = kind_with(math, root, call);
            add(kind, i, false);
            const bool new_call = seen_roots_.insert(root).second;
            add_call(kind, call, new_call ? 1 : 0, trace_.runs[i].us, false);
            if (new_call) repeats_.note(diagnosis_.kinds[kind].repeats, root, call);
            note_fp32(kind, i);
        }
    }

    /// Notes that PyTorch's math path converts 16-bit inputs to fp32, so that its GEMMs do not use the tensor cores.
    void note_fp32(std::size_t kind, std::uint32_t run) {
        const std::string lower = lower_case(trace_.kernels[trace_.runs[run].name]);
        const bool multiply_adds = contains(lower, "sgemm") || (contains(lower, "gemm") && contains(lower, "_ffma_"));
        if (!multiply_adds || contains(lower, "tf32")) return;
        std::vector<std::string>& features = diagnosis_.kinds[kind].reading.features;
        const std::string feature = "GEMMs in fp32, without tensor cores";
        if (std::find(features.begin(), features.end(), feature) == features.end()) features.push_back(feature);
    }

    bool compiled(std::uint32_t run) const { return by_inductor(trace_.kernels[trace_.runs[run].name]); }

    RunFacts facts_of_runs() {
        RunFacts facts;
        facts.role = [&](std::uint32_t run) {
            // These kernels pass as elementwise: sums of a split GEMM's parts, the test for a fully masked row, and
            // each row's largest score, which some models subtract before the softmax.
            const std::string& name = trace_.kernels[trace_.runs[run].name];
            const bool largest = contains_any(name, {"::MaxOps<", "::MaxNanFunctor<"}) ||
                                 (by_inductor(name) && reading(run).role == Role::other && contains(name, "amax"));
            const bool passed_over = largest || contains_any(name, {"splitKreduce", "and_kernel_"});
            // This is the gradient of scores that were shifted by their relative positions (XLNet).
            const bool shifted = contains(name, "::indexFunc") && left_input_of(ops_[run]).size() >= 3;
            return passed_over || shifted ? Role::elementwise : reading(run).role;
        };
        facts.compiled = [&](std::uint32_t run) { return compiled(run); };
        facts.taken = [&](std::uint32_t run) { return static_cast<bool>(taken_[run]); };
        facts.batched = [&](std::uint32_t run) {  // the reader keeps the operators aten::bmm and aten::baddbmm
            return ops_[run] != OpTree::kNone || contains(trace_.kernels[trace_.runs[run].name], "triton_");
        };
        facts.softmax_input = [&](std::uint32_t run) {
            const std::int64_t op = ops_[run];
            if (op == OpTree::kNone || !contains(tree_.name(op), "oftmax")) return Sizes{};
            // A fused softmax may have the scores anywhere among its inputs, beside masks and row sums.
            return compiled(run) ? largest_input_of(op) : left_input_of(op);
        };
        const auto shapes = [&](std::uint32_t run) {
            return ops_[run] == OpTree::kNone ? GemmShapes{}
                                              : gemm_shapes_of(tree_.name(ops_[run]), tree_.inputs(ops_[run]));
        };
        const auto matches = [](const Sizes& matrix, const Sizes& scores) {
            return matrix.size() == 2 && scores.size() >= 2 &&
                   std::equal(matrix.begin(), matrix.end(), scores.end() - 2);
        };
        facts.reads = [=](std::uint32_t run, const Sizes& scores) {
            const GemmShapes gemm = shapes(run);
            return matches(gemm.left, scores) || matches(gemm.right, scores);
        };
        facts.writes = [=](std::uint32_t run, const Sizes& scores) { return matches(shapes(run).output, scores); };
        return facts;
    }

    const Sizes& left_input_of(std::int64_t op) {
        return read_once(left_inputs_, op, [](const std::string& inputs) { return shape_of_input(inputs, 0); });
    }

    const Sizes& largest_input_of(std::int64_t op) { return read_once(largest_inputs_, op, shape_of_largest_input); }

    /// A shape among an operator's inputs; it is parsed once for all operators with equal inputs.
    template <typename Shape>
    const Sizes& read_once(std::unordered_map<std::uint32_t, Sizes>& known, std::int64_t op, Shape shape) const {
        static const Sizes kNothing;
        if (op == OpTree::kNone || tree_.run(op).inputs == Texts::kLost) return kNothing;
        const auto [entry, is_new] = known.try_emplace(tree_.run(op).inputs);
        if (is_new) entry->second = shape(tree_.inputs(op));
        return entry->second;
    }

    SoftmaxSigns signs_of(std::uint32_t softmax, const RunFacts& facts) const {
        const std::int64_t op = ops_[softmax];
        const bool safe = tree_.inside(op, "aten::_safe_softmax") || tree_.inside(op, "SafeSoftmaxBackward0");
        return {facts.softmax_input(softmax), safe, tree_.inside(op, "SoftmaxBackwardDataBackward0")};
    }

    void take_by_hand() {
        const RunFacts facts = facts_of_runs();
        ByHandReader reader;
        for (const ByHand& found : find_by_hand(trace_, facts)) {
            const std::optional<Call>& call =
                found.pass == KernelPass::forward ? call_of(ops_[found.first_gemm]) : call_of(OpTree::kNone);
            const std::size_t kind =
                kind_with(reader.read(found.pass, signs_of(found.softmax, facts)), OpTree::kNone, call);
            double us = 0;
            for (const std::uint32_t run : found.runs) {
                us += trace_.runs[run].us;
                const Role role = reading(run).role;
                add(kind, run, role != Role::gemm && role != Role::softmax && role != Role::softmax_backward);
                note_fp32(kind, run);
            }
            add_call(kind, call, 1, us, true);
            repeats_.note(diagnosis_.kinds[kind].repeats, ops_[found.first_gemm], call);
        }
    }

    /// Assigns helpers to the call around them, or to the longest kind of their family and pass. Other kernels within
    /// an operator of attention are assigned to it too.
    void take_residual() {
        for (std::uint32_t i = 0; i < trace_.runs.size(); ++i) {
            if (taken_[i]) continue;
            const Role role = reading(i).role;
            const auto root = kind_of_root_.find(roots_[i]);
            const bool known_call = root != kind_of_root_.end();
            if (role == Role::helper) {
                add(known_call ? root->second : kind_for_helper(reading(i)), i, true);
            } else if (known_call && roots_[i] != OpTree::kNone && role != Role::look_alike &&
                       tree_.name(roots_[i]).compare(0, 6, "aten::") == 0) {
                add(root->second, i, true);
            } else if (role == Role::look_alike) {
                add_row(look_alikes_, i);
            } else if (role == Role::unknown) {
                add_row(unknown_, i);
            } else if (!trace_.ordered && (role == Role::softmax || role == Role::softmax_backward)) {
                add_row(softmaxes_, i);
            }
        }
    }

    void add_row(std::map<std::uint32_t, KernelSum>& rows, std::uint32_t run) const {
        KernelSum& sum = rows[trace_.runs[run].name];
        sum.count += trace_.runs[run].count;
        sum.us += trace_.runs[run].us;
    }

    std::size_t kind_for_helper(const NameReading& helper) {
        std::size_t best = diagnosis_.kinds.size();
        for (std::size_t i = 0; i < diagnosis_.kinds.size(); ++i) {
            const AttentionKind& kind = diagnosis_.kinds[i];
            const bool fits = kind.reading.role == Role::attention && kind.reading.family == helper.family &&
                              kind.reading.pass == helper.pass &&
                              (helper.head_dim == 0 || kind.reading.head_dim == helper.head_dim);
            const auto rank = [&](const AttentionKind& k) {  // of the same library, then the longest
                return std::pair(k.reading.library == helper.library, k.us);
            };
            if (fits && (best == diagnosis_.kinds.size() || rank(kind) > rank(diagnosis_.kinds[best]))) best = i;
        }
        return best < diagnosis_.kinds.size() ? best : kind_with(helper, OpTree::kNone, {});
    }

    Diagnosis finished() {
        Diagnosis& d = diagnosis_;
        d.file = trace_.file;
        d.tool = trace_.tool;
        d.gpus = trace_.gpus;
        d.torch = trace_.torch;
        d.timed = trace_.timed;
        d.notes = trace_.notes;
        d.backends_of_operators = trace_.backends_of_operators;
        for (std::size_t i = 0; i < d.kinds.size(); ++i) finish(d.kinds[i], i);
        std::stable_sort(d.kinds.begin(), d.kinds.end(),
                         [](const AttentionKind& a, const AttentionKind& b) { return a.us > b.us; });
        d.look_alikes = named_kernels(trace_, readings_, look_alikes_);
        d.unknown = named_kernels(trace_, readings_, unknown_);
        d.softmaxes = named_kernels(trace_, readings_, softmaxes_);
        if (trace_.runs.empty()) list_cpu_ops();
        d.clock = clock_of(trace_, taken_);
        d.steps = steps_of(trace_, taken_);
        d.shares = shares_of(trace_, readings_, taken_);
        return std::move(d);
    }

    void finish(AttentionKind& kind, std::size_t index) {
        diagnosis_.attention_us += kind.us;
        for (const auto& [name, sum] : sums_[index]) {
            KernelSum kernel = sum;
            kernel.name = trace_.kernels[name];
            kernel.role = readings_[name].role;
            kind.kernels.push_back(kernel);
        }
        std::stable_sort(kind.kernels.begin(), kind.kernels.end(),
                         [](const KernelSum& a, const KernelSum& b) { return a.us > b.us; });
        for (const auto& [text, sum] : shapes_[index]) {
            kind.shapes.push_back(sum);
            kind.shapes.back().spread = spread_of(times_[index][text]);
        }
        if (kind.shapes.empty()) kind.spread = spread_of(times_[index][""]);
        kind.host = spread_of(host_times_[index]);
        share_evidence(kind, sums_[index], readings_);
        std::stable_sort(kind.shapes.begin(), kind.shapes.end(),
                         [](const ShapeSum& a, const ShapeSum& b) { return a.us > b.us; });
        if (!kind.asked_by.empty()) kind.reading.evidence.push_back("called by the operator " + kind.asked_by);
    }

    void list_cpu_ops() {
        std::map<std::string, std::int64_t> counts;
        for (std::size_t op = 0; op < trace_.ops.size(); ++op) {
            const auto index = static_cast<std::int64_t>(op);
            if (tree_.attention_around(index) != OpTree::kNone) ++counts[tree_.name(index)];
        }
        for (const auto& [name, count] : counts)
            diagnosis_.cpu_ops.push_back(name + (count == 1 ? ", once" : ", " + std::to_string(count) + " times"));
    }

    Trace& trace_;
    OpTree tree_;
    Diagnosis diagnosis_;
    std::vector<NameReading> readings_;  // [names]
    std::vector<bool> taken_;            // [runs]
    std::vector<std::int64_t> ops_;      // [runs] the operator that launched it
    std::vector<std::int64_t> roots_;    // [runs] the operator of attention around ops_[run]
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::optional<Call>> calls_;
    std::unordered_map<std::uint32_t, Sizes> left_inputs_;  // by the index of an operator's inputs
    std::unordered_map<std::uint32_t, Sizes> largest_inputs_;
    std::map<KindKey, std::size_t> kinds_;
    std::vector<std::unordered_map<std::uint32_t, KernelSum>> sums_;  // [kinds] by name
    std::vector<std::map<std::string, ShapeSum>> shapes_;             // [kinds] by their text
    RepeatFinder repeats_;
    std::vector<std::map<std::string, std::vector<float>>> times_;  // [kinds] by the text of their shape
    std::vector<std::vector<float>> host_times_;                    // [kinds]
    std::size_t kept_times_ = 0;
    std::unordered_map<std::int64_t, std::size_t> kind_of_root_;
    std::unordered_set<std::int64_t> seen_roots_;
    std::map<std::uint32_t, KernelSum> look_alikes_;
    std::map<std::uint32_t, KernelSum> unknown_;
    std::map<std::uint32_t, KernelSum> softmaxes_;
};

}  // namespace

Diagnosis diagnose(Trace& trace) { return Sorter(trace).sorted(); }

}  // namespace tessera::diagnose
