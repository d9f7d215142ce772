// SPDX-License-Identifier: Apache-2.0
//
// fa1 forward (FlashAttention paper, Algorithm 1): K/V blocks outer, Q blocks inner. O, m and l of every query live in
// slow memory. Each K/V block reads them all, rescales them and writes them back, with O normalised by l at every step.
// It touches O ceil(len_kv / block_kv) times, fa2 only once; that is the lesson of this file.
//
// Parallel over batch and heads as in the paper. If those are fewer than the threads, each head's queries are split
// over several tasks, which are independent runs of the algorithm.
#include <vector>

#include "cpu/schedules.hpp"
#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::fa1 {
namespace {

/// Memory of one worker.
struct ForwardScratch {
    simd::TileScratch tiles;
    float* inverse;  // [lanes], 1 / l
    float* old_l;    // [lanes]
    float* spare_o;  // [head_dim_v, lanes]

    ForwardScratch(Arena& arena, const Geometry& g)
        : tiles(arena, g),
          inverse(arena.take<float>(g.lanes)),
          old_l(arena.take<float>(g.lanes)),
          spare_o(arena.take<float>(g.head_dim_v * g.lanes)) {}
};

/// Slow memory: the state that the algorithm keeps per query between K/V blocks, and Q^T.
struct ForwardWorkspace {
    std::int64_t* ends;  // take_task_ends()
    float* q_t;          // [heads_q, panels, head_dim, lanes]
    float* sums;         // [heads_q, panels, simd::PanelSums]
    std::vector<ForwardScratch> workers;

    ForwardWorkspace(Arena& arena, const Plan& plan, const Geometry& g) {
        const std::int64_t panels = total_panels(plan.problem, g);
        ends = take_task_ends(arena, plan.problem);
        q_t = arena.take<float>(plan.problem.heads_q, panels, g.head_dim * g.lanes);
        sums = arena.take<float>(plan.problem.heads_q, panels, simd::PanelSums::floats(g));
        for (int worker = 0; worker < plan.threads; ++worker) workers.emplace_back(arena, g);
    }
};

/// One (Q block, K/V block) step, lines 6 to 13 of the algorithm:
///   P = exp(S - m_new);  l_new = exp(m - m_new) l + rowsum(P);  O = (exp(m - m_new) l / l_new) O + (P / l_new) V
void step(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
          const float* q_t, const ForwardScratch& scratch, simd::PanelSums& sums) {
    float* old_share = scratch.tiles.rescale;
    std::copy_n(sums.state.l, panel.lanes, scratch.old_l);
    simd::scores(head, g, panel, kv, coverage, q_t, scratch.tiles.s, scratch.tiles.bias_or_dropout);
    simd::online_softmax(scratch.tiles.s, kv.keys, panel.lanes, panel.lanes, sums.state, old_share);
    simd::invert_sums(sums.state, panel.lanes, scratch.inverse);
    for (std::int64_t i = 0; i < panel.lanes; ++i) {
        // Dividing, instead of multiplying by 1 / l, gives exactly 1 if the block is hidden from the row, so that O
        // keeps its bits.
        if (sums.state.l[i] != 0) old_share[i] *= scratch.old_l[i] / sums.state.l[i];
    }
    simd::scale_lanes(scratch.tiles.s, scratch.inverse, kv.keys, panel.lanes);
    simd::add_values(head, g, panel, kv, coverage, scratch.tiles.s, scratch.tiles.bias_or_dropout, sums.o,
                     simd::Into::scaled_add, old_share);
}

/// Adds the sinks to the sums of a panel, after its last K/V block. O is normalised by the keys' l already.
void add_sinks(const Head& head, const Geometry& g, const Panel& panel, const ForwardScratch& scratch,
               const simd::PanelSums& sums) {
    std::copy_n(sums.state.l, panel.lanes, scratch.old_l);
    simd::finish_softmax(sums.state, head.sinks, panel.first, panel.queries, panel.lanes, scratch.inverse);
    for (std::int64_t i = 0; i < panel.lanes; ++i) scratch.inverse[i] *= scratch.old_l[i];
    simd::scale_lanes(sums.o, scratch.inverse, g.head_dim_v, panel.lanes);
}

/// Runs the algorithm for panels [begin, end) of one head.
void run(const ForwardCall& call, const Geometry& g, const Head& head, Range panels, const ForwardWorkspace& workspace,
         const ForwardScratch& scratch) {
    TileTally tally(call);
    const Problem& p = call.plan.problem;
    const auto q_t_of = [&](std::int64_t index) {
        return workspace.q_t + panel_slot(p, g, head, index) * g.head_dim * g.lanes;
    };
    const auto sums_of = [&](std::int64_t index) {
        simd::PanelSums sums(workspace.sums + panel_slot(p, g, head, index) * simd::PanelSums::floats(g), g);
        sums.started = true;  // O is 0 before the first block
        return sums;
    };

    for (std::int64_t index = panels.begin; index < panels.end; ++index) {
        const Panel panel(index, g.block_q, head.sequence.len_q);
        const simd::PanelSums sums = sums_of(index);
        simd::load_queries(head, g, panel, q_t_of(index));
        simd::clear_state(sums.state, panel.lanes);
        std::fill_n(sums.o, g.head_dim_v * panel.lanes, 0.0F);
    }
    for (std::int64_t first = 0; first < head.sequence.len_kv; first += g.block_kv) {
        const Range keys{first, std::min(head.sequence.len_kv, first + g.block_kv)};
        const Range queries = head.band.q_range(keys.begin, keys.end);
        const Range touched{std::max(panels.begin, queries.begin / g.block_q),
                            std::min(panels.end, ceil_div(queries.end, g.block_q))};
        tally.skipped(panels.size(), queries.empty() ? 0 : touched.size());
        if (queries.empty() || touched.empty()) continue;
        const KvTile loaded = simd::load_kv(head, g, first, keys.size(), scratch.tiles, touched.size() == 1);
        for (std::int64_t index = touched.begin; index < touched.end; ++index) {
            const Panel panel(index, g.block_q, head.sequence.len_q);
            KvTile kv = loaded;
            kv.keys = std::min(keys.end, head.keys_of(panel).end) - first;
            const Coverage coverage = head.coverage(panel, kv);
            simd::PanelSums sums = sums_of(index);
            step(head, g, panel, kv, coverage, q_t_of(index), scratch, sums);
            tally.ran(coverage, panel, kv);
            tally.report([&] {
                TileReport report = report_of(TileStep::values, head, panel, {first, first + kv.keys}, coverage, sums);
                report.p = scratch.tiles.s;
                report.rescale = scratch.tiles.rescale;
                return report;
            });
        }
    }
    for (std::int64_t index = panels.begin; index < panels.end; ++index) {
        const Panel panel(index, g.block_q, head.sequence.len_q);
        const simd::PanelSums sums = sums_of(index);
        if (head.sinks.data != nullptr) add_sinks(head, g, panel, scratch, sums);
        if (!simd::all_finite(sums.o, panel.lanes, g.head_dim_v, panel.lanes))
            simd::recompute_overflow(head, g, panel, q_t_of(index), scratch.tiles, sums.state, sums.o, scratch.spare_o);
        simd::store_o_and_lse(head, g, panel, sums, scratch.inverse, call.args);
        tally.report(
            [&] { return report_of(TileStep::finish, head, panel, head.keys_of(panel), Coverage::full, sums); });
    }
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    Arena arena;
    const Geometry g(plan);
    ForwardWorkspace(arena, plan, g);
    return arena.used();
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    const ForwardWorkspace workspace(arena, call.plan, g);
    const std::int64_t heads = p.batch * p.heads_q;
    if (heads == 0) return;
    const std::int64_t parts = heads >= call.plan.threads ? 1 : ceil_div(2 * call.plan.threads, heads);
    const auto panels_per_part = [&](const Sequence& m) {
        return std::max<std::int64_t>(1, ceil_div(g.panels_of(m), parts));
    };
    const HeadTasks tasks(call, p.heads_q, workspace.ends,
                          [&](const Sequence& m) { return ceil_div(g.panels_of(m), panels_per_part(m)); });
    call.parallel_for(tasks.total(), call.plan.threads, [&](std::int64_t index, int worker) {
        const HeadTask task = tasks.by_index(index);
        const Sequence sequence = sequence_of(call, task.head / p.heads_q);
        const std::int64_t part = task.tasks - 1 - task.index;  // the last queries see the most keys and go first
        const Range panels{part * panels_per_part(sequence),
                           std::min(g.panels_of(sequence), (part + 1) * panels_per_part(sequence))};
        run(call, g, Head(p, call.args, sequence, task.head % p.heads_q), panels, workspace,
            workspace.workers[static_cast<std::size_t>(worker)]);
    });
}

}  // namespace tessera::cpu::fa1
