// SPDX-License-Identifier: Apache-2.0
//
// Standard attention: one pass writes S = Q K^T for all pairs to memory, a second turns its rows into P by softmax, a
// third multiplies P by V. The three loops pass the whole len_q x len_kv matrix through memory: the baseline that the
// other schedules avoid. The tiles are those of the other schedules, and fully masked tiles are skipped here too.
#include <limits>
#include <utility>
#include <vector>

#include "cpu/schedules.hpp"
#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::standard {
namespace {

/// Memory of one worker.
struct ForwardScratch {
    simd::TileScratch tiles;
    float* q_t;  // [head_dim, lanes]
    simd::PanelSums sums;
    float* part;  // [head_dim_v, lanes], O of kSumKeys keys

    ForwardScratch(Arena& arena, const Geometry& g)
        : tiles(arena, g),
          q_t(arena.take<float>(g.head_dim * g.lanes)),
          sums(arena, g),
          part(arena.take<float>(g.head_dim_v * g.lanes)) {}
};

struct ForwardWorkspace {
    std::int64_t* ends;  // take_task_ends()
    float* scores;       // [heads_q, panels, len_kv, lanes]: S, then P
    float* states;       // [heads_q, panels, 2, lanes]: m and l of every row
    std::vector<ForwardScratch> workers;

    ForwardWorkspace(Arena& arena, const Plan& plan, const Geometry& g) {
        const std::int64_t panels = total_panels(plan.problem, g);
        ends = take_task_ends(arena, plan.problem);
        scores = arena.take<float>(plan.problem.heads_q, panels, plan.problem.len_kv, g.lanes);
        states = arena.take<float>(plan.problem.heads_q, panels, 2 * g.lanes);
        for (int worker = 0; worker < plan.threads; ++worker) workers.emplace_back(arena, g);
    }
};

/// A panel and its rows of the materialised matrix.
struct MaterialisedPanel : HeadPanel {
    float* matrix;  // [len_kv, lanes]
    simd::RowState state;

    MaterialisedPanel(const ForwardCall& call, const Geometry& g, const ForwardWorkspace& workspace,
                      const HeadTask& task)
        : HeadPanel(head_of(call, task.head), task.index, g.block_q) {
        const Problem& p = call.plan.problem;
        const std::int64_t slot = panel_slot(p, g, head, task.index);
        matrix = workspace.scores + slot * p.len_kv * g.lanes;
        state = {workspace.states + slot * 2 * g.lanes, workspace.states + (slot * 2 + 1) * g.lanes};
    }
};

/// Calls body(kv tile, coverage, rows of the matrix) for every tile of the panel that the mask leaves.
template <class Body>
void for_each_tile(const MaterialisedPanel& work, const Geometry& g, const simd::TileScratch& tiles, const Body& body) {
    simd::for_each_kv_tile(work.head, g, work.panel, tiles, [&](const KvTile& kv, Coverage coverage) {
        body(kv, coverage, work.matrix + kv.first * work.panel.lanes);
    });
}

Range keys_of(const KvTile& kv) { return {kv.first, kv.first + kv.keys}; }

TileReport report_of_values(TileStep step, const MaterialisedPanel& work, Range keys, Coverage coverage, const float* p,
                            const float* o) {
    TileReport report = report_of(step, work.head, work.panel, keys, coverage);
    report.p = p;
    report.m = work.state.m;
    report.l = work.state.l;
    report.o = o;
    return report;
}

void materialise_scores(const ForwardCall& call, const Geometry& g, const MaterialisedPanel& work,
                        const ForwardScratch& scratch) {
    TileTally tally(call);
    std::int64_t touched = 0;
    simd::load_queries(work.head, g, work.panel, scratch.q_t);
    for_each_tile(work, g, scratch.tiles, [&](const KvTile& kv, Coverage coverage, float* s) {
        simd::scores(work.head, g, work.panel, kv, coverage, scratch.q_t, s, scratch.tiles.bias_or_dropout);
        tally.ran(coverage, work.panel, kv);
        tally.report([&] {
            TileReport report = report_of(TileStep::scores, work.head, work.panel, keys_of(kv), coverage);
            report.s = s;
            return report;
        });
        ++touched;
    });
    tally.skipped(ceil_div(work.head.sequence.len_kv, g.block_kv), touched);
}

/// P = softmax(S) over all keys of a row at once.
void softmax_rows(const ForwardCall& call, const Geometry& g, const MaterialisedPanel& work,
                  const ForwardScratch& scratch) {
    const Panel& panel = work.panel;
    float* factors = scratch.tiles.rescale;
    const auto finish = [&] {
        simd::finish_softmax(work.state, work.head.sinks, panel.first, panel.queries, panel.lanes, factors);
    };
    simd::clear_state(work.state, panel.lanes);
    if (work.keys.empty()) return finish();
    const std::int64_t scored = work.keys.begin / g.block_kv * g.block_kv;
    const std::int64_t begin = scored / 4 * 4;  // online_softmax() needs a multiple of 4
    float* rows = work.matrix + begin * panel.lanes;
    std::fill_n(rows, (scored - begin) * panel.lanes, -std::numeric_limits<float>::infinity());
    simd::online_softmax(rows, work.keys.end - begin, panel.lanes, panel.lanes, work.state, factors, nullptr, begin);
    finish();
    simd::scale_lanes(rows, factors, work.keys.end - begin, panel.lanes);
    TileTally(nullptr, call.observer).report([&] {
        TileReport report = report_of(TileStep::softmax, work.head, work.panel, {begin, work.keys.end}, Coverage::full);
        report.p = rows;
        report.m = work.state.m;
        report.l = work.state.l;
        return report;
    });
}

void multiply_values(const ForwardCall& call, const Geometry& g, const MaterialisedPanel& work,
                     const ForwardScratch& scratch) {
    const Head& head = work.head;
    const TileTally tally(nullptr, call.observer);
    float* o = scratch.sums.o;
    std::fill_n(o, g.head_dim_v * work.panel.lanes, 0.0F);
    std::fill_n(scratch.part, g.head_dim_v * work.panel.lanes, 0.0F);
    const auto add_part = [&] {
        simd::add(o, scratch.part, g.head_dim_v, work.panel.lanes);
        std::fill_n(scratch.part, g.head_dim_v * work.panel.lanes, 0.0F);
    };
    std::int64_t part = 0;
    for_each_tile(work, g, scratch.tiles, [&](const KvTile& kv, Coverage coverage, float* p) {
        if (kv.first / simd::kSumKeys != std::exchange(part, kv.first / simd::kSumKeys)) add_part();
        simd::add_values(head, g, work.panel, kv, coverage, p, scratch.tiles.bias_or_dropout, scratch.part,
                         simd::Into::add, nullptr);
        tally.report([&] { return report_of_values(TileStep::values, work, keys_of(kv), coverage, p, scratch.part); });
    });
    add_part();
    if (!simd::all_finite(o, work.panel.lanes, g.head_dim_v, work.panel.lanes)) {
        simd::load_queries(head, g, work.panel, scratch.q_t);
        simd::recompute_overflow(head, g, work.panel, scratch.q_t, scratch.tiles, work.state, o, scratch.part);
    }
    simd::PanelSums sums = scratch.sums;  // P is normalised, and so is O
    sums.state = work.state;
    sums.started = true;
    simd::store_o_and_lse(head, g, work.panel, sums, scratch.tiles.rescale, call.args);
    tally.report([&] { return report_of_values(TileStep::finish, work, work.keys, Coverage::full, nullptr, o); });
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
    const HeadTasks panels(call, p.heads_q, workspace.ends, [&](const Sequence& m) { return g.panels_of(m); });
    const auto for_each_panel = [&](const auto& body) {
        call.parallel_for(panels.total(), call.plan.threads, [&](std::int64_t task, int worker) {
            const MaterialisedPanel work(call, g, workspace, panels.by_head(task));
            body(work, workspace.workers[static_cast<std::size_t>(worker)]);
        });
    };
    for_each_panel([&](const MaterialisedPanel& work, const ForwardScratch& scratch) {
        materialise_scores(call, g, work, scratch);
    });
    for_each_panel(
        [&](const MaterialisedPanel& work, const ForwardScratch& scratch) { softmax_rows(call, g, work, scratch); });
    for_each_panel(
        [&](const MaterialisedPanel& work, const ForwardScratch& scratch) { multiply_values(call, g, work, scratch); });
}

}  // namespace tessera::cpu::standard
