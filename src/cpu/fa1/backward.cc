// SPDX-License-Identifier: Apache-2.0
//
// fa1 backward (FlashAttention paper, Algorithm 4): K/V blocks outer, Q blocks inner. dK and dV of the block stay in
// fast memory while every Q block is read again. dQ is read, added to and written back for every K/V block. P is
// recomputed from the LSE. It is parallel over batch and kv heads only, as in the paper; compare fa2/simd/backward.cc.
#include "cpu/schedules.hpp"
#include "cpu/steps/simd/gradient.hpp"

namespace tessera::cpu::fa1 {
namespace {

/// All Q blocks of one head against one K/V block.
void run_queries(const Head& head, const Geometry& g, Range keys, const simd::GradientMemory& memory,
                 const simd::GradientScratch& scratch, TileTally& tally) {
    const Range queries = head.band.q_range(keys.begin, keys.end);
    const std::int64_t panels = ceil_div(head.sequence.len_q, g.block_q);
    const Range touched =
        queries.empty() ? Range{} : Range{queries.begin / g.block_q, ceil_div(queries.end, g.block_q)};
    tally.skipped(panels, touched.size());
    if (touched.empty()) return;
    const KvTile kv = simd::load_kv(head, g, keys.begin, keys.size(), scratch, touched.size() == 1);
    for (std::int64_t index = touched.begin; index < touched.end; ++index) {
        const Panel panel(index, g.block_q, head.sequence.len_q);
        const Coverage coverage = head.coverage(panel, kv);
        const simd::GradientPanel from = memory.panel(head, index);
        float* dk = memory.dk(head.sequence, head.kv_head, keys.begin);
        float* dv = memory.dv(head.sequence, head.kv_head, keys.begin);
        simd::backward_tile(head, g, panel, kv, coverage, from, scratch, dk, dv);
        tally.ran(coverage, panel, kv);
        tally.report([&] { return report_of(head, g, panel, kv, coverage, from, scratch, dk, dv); });
        memory.added_to_keys(head, keys);
        memory.added_to_queries(head, index);
    }
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    simd::BackwardWorkspace(arena, plan, Geometry(plan));
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    simd::BackwardWorkspace workspace(arena, call.plan, g);
    workspace.prepare(call);
    call.parallel_for(p.batch * p.heads_kv, call.plan.threads, [&](std::int64_t task, int worker) {
        TileTally tally(call);
        const Sequence sequence = sequence_of(call, task / p.heads_kv);
        for (std::int64_t first = 0; first < sequence.len_kv; first += g.block_kv) {
            const Range keys{first, std::min(sequence.len_kv, first + g.block_kv)};
            for_each_query_head(call, sequence, task % p.heads_kv, [&](const Head& head) {
                run_queries(head, g, keys, workspace.memory, workspace.workers[static_cast<std::size_t>(worker)],
                            tally);
            });
        }
    });
    workspace.bias.run(call, workspace.memory, workspace.workers);
    workspace.memory.finish(call);
}

}  // namespace tessera::cpu::fa1
