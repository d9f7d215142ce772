// SPDX-License-Identifier: Apache-2.0
#include "diagnose/repeats.hpp"

#include <algorithm>
#include <utility>

namespace tessera::diagnose {

RepeatFinder::RepeatFinder(const Trace& trace, const OpTree& tree) : tree_(tree) {
    for (std::uint32_t i = 0; i < trace.ops.size(); ++i) {
        const std::string& name = trace.ops_named[trace.ops[i].name];
        if (name != "aten::repeat_interleave" && name != "aten::expand") continue;
        if (const auto repeated = repeat_of_inputs(name, tree.inputs(i)))
            repeats_.push_back({trace.ops[i].thread, trace.ops[i].end_us, *repeated});
    }
    std::sort(repeats_.begin(), repeats_.end(), [](const RepeatOp& a, const RepeatOp& b) {
        return a.thread != b.thread ? a.thread < b.thread : a.end_us < b.end_us;
    });
}

void RepeatFinder::note(Repeats& repeats, std::int64_t op, const std::optional<Call>& call) const {
    constexpr double kShortlyBefore = 20'000;  // us
    if (op == OpTree::kNone || !call || !call->k.shape || call->k.shape->size() != 4) return;
    const OpRun& run = tree_.run(op);
    const Sizes& k = *call->k.shape;
    auto after =
        std::upper_bound(repeats_.begin(), repeats_.end(), std::pair(run.thread, run.start_us),
                         [](const std::pair<std::uint32_t, double>& at, const RepeatOp& repeat) {
                             return at.first != repeat.thread ? at.first < repeat.thread : at.second < repeat.end_us;
                         });
    for (; after != repeats_.begin(); --after) {
        const RepeatOp& repeat = *(after - 1);
        if (repeat.thread != run.thread || repeat.end_us < run.start_us - kShortlyBefore) return;
        const RepeatedHeads& made = repeat.made;
        const std::int64_t heads = (call->heads_in_batch ? made.batch : 1) * made.heads * made.times;
        if (heads != k[1] || made.len != k[2] || made.head_dim != k[3]) continue;
        ++repeats.calls;
        repeats.times = made.times;
        repeats.heads_kv = made.heads;
        return;
    }
}

}  // namespace tessera::diagnose
