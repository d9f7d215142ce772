// SPDX-License-Identifier: Apache-2.0
//
// Standard backward: materialises P and dS of all pairs, two len_q x len_kv matrices per head, and reads them again for
// the GEMMs with dO, Q and K. The tiles and sums are those of the other schedules.
#include "cpu/schedules.hpp"
#include "cpu/steps/simd/gradient.hpp"

namespace tessera::cpu::standard {
namespace {

struct MaterialisedWorkspace : simd::BackwardWorkspace {
    std::int64_t matrix_floats;
    float* p;   // [heads_q, panels, len_kv, lanes]
    float* ds;  // [heads_q, panels, len_kv, lanes]

    MaterialisedWorkspace(Arena& arena, const Plan& plan, const Geometry& g)
        : simd::BackwardWorkspace(arena, plan, g), matrix_floats(plan.problem.len_kv * g.lanes) {
        const std::int64_t panels = total_panels(plan.problem, g);
        p = arena.take<float>(plan.problem.heads_q, panels, matrix_floats);
        ds = arena.take<float>(plan.problem.heads_q, panels, matrix_floats);
    }

    /// The offset of key `key` and panel `index` in both matrices.
    std::int64_t at(const Plan& plan, const Geometry& g, const Head& head, std::int64_t index, std::int64_t key,
                    std::int64_t lanes) const {
        return panel_slot(plan.problem, g, head, index) * matrix_floats + key * lanes;
    }
};

/// Computes P and dS of all tiles of a panel.
void materialise(const BackwardCall& call, const Geometry& g, const MaterialisedWorkspace& workspace, const Head& head,
                 std::int64_t index, int worker) {
    TileTally tally(call);
    const Panel panel(index, g.block_q, head.sequence.len_q);
    simd::GradientScratch scratch = workspace.workers[static_cast<std::size_t>(worker)];
    std::int64_t touched = 0;
    simd::for_each_kv_tile(head, g, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
        scratch.s = workspace.p + workspace.at(call.plan, g, head, index, kv.first, panel.lanes);
        scratch.ds = workspace.ds + workspace.at(call.plan, g, head, index, kv.first, panel.lanes);
        simd::score_gradient(head, g, panel, kv, coverage, workspace.memory.panel(head, index), scratch);
        simd::through_softcap(head, panel, kv, scratch);
        tally.ran(coverage, panel, kv);
        tally.report([&] {
            return report_of(TileStep::weights, head, panel, kv, coverage, workspace.memory.panel(head, index),
                             scratch.s, scratch.ds);
        });
        ++touched;
    });
    tally.skipped(ceil_div(head.sequence.len_kv, g.block_kv), touched);
}

/// Computes dQ of a panel from its rows of dS.
void query_gradient(const BackwardCall& call, const Geometry& g, const MaterialisedWorkspace& workspace,
                    const Head& head, std::int64_t index, int worker) {
    const Panel panel(index, g.block_q, head.sequence.len_q);
    const simd::GradientPanel from = workspace.memory.panel(head, index);
    const simd::TileScratch& scratch = workspace.workers[static_cast<std::size_t>(worker)];
    simd::for_each_kv_tile(head, g, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
        const std::int64_t at = workspace.at(call.plan, g, head, index, kv.first, panel.lanes);
        simd::add_dq(head, g, panel, kv, coverage, from, workspace.ds + at);
        TileTally(nullptr, call.observer).report([&] {
            TileReport report =
                report_of(TileStep::dq, head, panel, kv, coverage, from, workspace.p + at, workspace.ds + at);
            report.dq = from.dq_t;
            return report;
        });
        workspace.memory.added_to_queries(head, index);
    });
}

/// Computes dK and dV of one block of keys from its columns of P and dS.
void key_gradient(const BackwardCall& call, const Geometry& g, const MaterialisedWorkspace& workspace, const Head& head,
                  Range keys) {
    const Range queries = head.band.q_range(keys.begin, keys.end);
    if (queries.empty()) return;
    for (std::int64_t index = queries.begin / g.block_q; index * g.block_q < queries.end; ++index) {
        const Panel panel(index, g.block_q, head.sequence.len_q);
        // The panel's last tile ends at the last key that it sees: further rows are uninitialised.
        const KvTile kv{.first = keys.begin, .keys = std::min(keys.end, head.keys_of(panel).end) - keys.begin};
        const Coverage coverage = head.coverage(panel, kv);
        const simd::GradientPanel from = workspace.memory.panel(head, index);
        const std::int64_t at = workspace.at(call.plan, g, head, index, kv.first, panel.lanes);
        float* dk = workspace.memory.dk(head.sequence, head.kv_head, kv.first);
        float* dv = workspace.memory.dv(head.sequence, head.kv_head, kv.first);
        simd::add_dv(head, g, panel, kv, coverage, from, workspace.p + at, dv);
        simd::add_dk(head, g, panel, kv, coverage, from, workspace.ds + at, dk);
        TileTally(nullptr, call.observer).report([&] {
            TileReport report =
                report_of(TileStep::dk_and_dv, head, panel, kv, coverage, from, workspace.p + at, workspace.ds + at);
            report.dk = dk;
            report.dk_stride = g.k_stride;
            report.dv = dv;
            report.dv_stride = g.v_stride;
            return report;
        });
        workspace.memory.added_to_keys(head, keys);
    }
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    MaterialisedWorkspace(arena, plan, Geometry(plan));
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    MaterialisedWorkspace workspace(arena, call.plan, g);
    workspace.prepare(call);
    const HeadTasks panels(call, p.heads_q, workspace.memory.task_ends(),
                           [&](const Sequence& m) { return g.panels_of(m); });
    const auto for_each_panel = [&](const auto& body) {
        call.parallel_for(panels.total(), call.plan.threads, [&](std::int64_t index, int worker) {
            const HeadTask task = panels.by_head(index);
            body(head_of(call, task.head), task.index, worker);
        });
    };
    for_each_panel([&](const Head& head, std::int64_t index, int worker) {
        materialise(call, g, workspace, head, index, worker);
    });
    for_each_panel([&](const Head& head, std::int64_t index, int worker) {
        query_gradient(call, g, workspace, head, index, worker);
    });
    const HeadTasks blocks(call, p.heads_kv, workspace.memory.task_ends(),
                           [&](const Sequence& m) { return ceil_div(m.len_kv, g.block_kv); });
    call.parallel_for(blocks.total(), call.plan.threads, [&](std::int64_t index, int) {
        const HeadTask task = blocks.by_head(index);
        const Sequence sequence = sequence_of(call, task.head / p.heads_kv);
        const Range keys{task.index * g.block_kv, std::min(sequence.len_kv, (task.index + 1) * g.block_kv)};
        for_each_query_head(call, sequence, task.head % p.heads_kv,
                            [&](const Head& head) { key_gradient(call, g, workspace, head, keys); });
    });
    workspace.bias.run(call, workspace.memory, workspace.workers);
    workspace.memory.finish(call);
}

}  // namespace tessera::cpu::standard
