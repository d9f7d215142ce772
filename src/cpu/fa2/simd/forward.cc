// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward (FlashAttention-2 paper, Algorithm 1): Q blocks outer, K/V blocks inner. m, l and O stay in fast memory
// until the block is done, and O is written once. Parallel over batch, heads and Q blocks; also over K/V if those are
// fewer than the threads.
//
// The keys of a row are summed in chunks of kChunk keys (work_split.hpp). online_softmax_step() of
// cpu/steps/simd/step.cc updates m, l and O for a K/V tile, including the rescaling. run_chunk() skips tiles that a
// causal mask hides.
#include <algorithm>
#include <vector>

#include "cpu/fa2/paths.hpp"
#include "cpu/fa2/simd/decode.hpp"
#include "cpu/fa2/simd/task.hpp"
#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::fa2::simd_path {
namespace {

/// The sizes of this call. If tiles are fewer than threads, the lanes of a panel are split over several tasks. Lanes
/// are independent, so a row's bits do not depend on its neighbours.
Geometry geometry_of(const Plan& plan) {
    constexpr std::int64_t kFewestLanes = simd::kLanes;
    Geometry g(plan);
    const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(plan.problem.len_kv, kChunk));
    const std::int64_t heads = plan.problem.batch * plan.problem.heads_q;
    while (g.block_q >= 2 * kFewestLanes && 2 * heads * g.panels * chunks <= worthwhile_threads(plan)) {
        g = Geometry(plan, ceil_div(g.block_q, 2 * kFewestLanes) * kFewestLanes);
    }
    return g;
}

/// Memory of one worker.
struct ForwardScratch {
    simd::TileScratch tiles;
    std::vector<float*> q_t;              // per panel: [head_dim, lanes]
    std::vector<simd::PanelSums> totals;  // per panel
    std::vector<simd::PanelSums> chunks;  // per panel: the current chunk's

    ForwardScratch(Arena& arena, const Geometry& g, std::int64_t panels) : tiles(arena, g) {
        for (std::int64_t i = 0; i < panels; ++i) {
            q_t.push_back(arena.take<float>(g.head_dim * g.lanes));
            totals.emplace_back(arena, g);
            chunks.emplace_back(arena, g);
        }
    }
};

struct ForwardWorkspace {
    const Geometry& g;
    const WorkSplit& work_split;
    std::int64_t* ends;  // take_task_ends()
    WorkerMemory workers;
    float* partials = nullptr;  // [kv_heads, panels_per_kv_head, chunks, simd::PanelSums], only if K/V is split

    ForwardWorkspace(Arena& arena, const Problem& p, const Geometry& geometry, const WorkSplit& of_call)
        : g(geometry),
          work_split(of_call),
          ends(take_task_ends(arena, p)),
          workers(arena, work_split.threads, [&](Arena& one) { ForwardScratch(one, g, work_split.panels_per_task); }) {
        if (work_split.split)
            partials = arena.take<float>(work_split.panels(), work_split.chunks, simd::PanelSums::floats(g));
    }
    ForwardScratch scratch(int worker) const {
        Arena memory = workers.arena(worker);
        return {memory, g, work_split.panels_per_task};
    }
    simd::PanelSums partial(std::int64_t kv_head, std::int64_t panel, std::int64_t chunk) const {
        return {partials + work_split.partial(kv_head, panel, chunk) * simd::PanelSums::floats(g), g};
    }
};

/// Runs the K/V tiles of one chunk for panels that share a kv head. K/V tiles are outer, so that each is loaded once;
/// panels are inner. A panel skips tiles of which it sees no key. sums[i] receives the panel's result for this chunk
/// alone.
void run_chunk(std::span<const HeadPanel> works, const Geometry& g, std::int64_t chunk, std::span<float* const> q_t,
               const simd::TileScratch& tiles, std::span<simd::PanelSums* const> sums, TileTally& tally) {
    for (simd::PanelSums* s : sums) s->started = false;
    const Head& head = works.front().head;
    const Range all{chunk * kChunk, std::min(head.sequence.len_kv, (chunk + 1) * kChunk)};
    for (std::int64_t first = all.begin; first < all.end; first += g.block_kv) {
        const Range tile_keys{first, std::min(all.end, first + g.block_kv)};
        std::int64_t end = first;  // keys that some panel sees
        for (const HeadPanel& work : works) {
            const Range seen = common(tile_keys, work.keys);
            if (!seen.empty()) end = std::max(end, seen.end);
        }
        if (end == first) continue;
        const KvTile loaded = simd::load_kv(head, g, first, end - first, tiles, works.size() == 1);
        for (std::size_t i = 0; i < works.size(); ++i) {
            const Range seen = common(tile_keys, works[i].keys);
            if (seen.empty()) continue;
            KvTile kv = loaded;
            kv.keys = seen.end - first;
            const Coverage coverage = works[i].head.coverage(works[i].panel, kv);
            simd::online_softmax_step(works[i].head, g, works[i].panel, kv, coverage, q_t[i], tiles, *sums[i]);
            tally.ran(coverage, works[i].panel, kv);
            tally.report([&] {
                TileReport report =
                    report_of(TileStep::values, works[i].head, works[i].panel, {first, seen.end}, coverage, *sums[i]);
                report.p = tiles.s;
                report.rescale = tiles.rescale;
                return report;
            });
        }
    }
}

void report_sums(const TileTally& tally, TileStep step, const HeadPanel& work, Range keys,
                 const simd::PanelSums& sums) {
    tally.report([&] { return report_of(step, work.head, work.panel, keys, Coverage::full, sums); });
}

/// The epilogue of a panel: O / l, O and LSE to memory.
void epilogue(const ForwardCall& call, const Geometry& g, const HeadPanel& work, const float* q_t,
              const simd::TileScratch& tiles, simd::PanelSums& total, const simd::PanelSums& spare) {
    simd::normalise(work.head, g, work.panel, q_t, tiles, total, spare.o);
    simd::store_o_and_lse(work.head, g, work.panel, total, tiles.rescale, call.args);
    report_sums(TileTally(nullptr, call.observer), TileStep::finish, work, work.keys, total);
}

/// Merges the sums of a chunk into those of the earlier chunks.
void merge_chunk(const ForwardCall& call, const Geometry& g, const HeadPanel& work, simd::PanelSums& total,
                 const simd::PanelSums& next, std::int64_t chunk) {
    simd::merge(total.state, total.o, next.state, next.o, g.head_dim_v, work.panel.lanes, work.panel.lanes);
    report_sums(TileTally(nullptr, call.observer), TileStep::merge, work, chunk_keys(work, chunk), total);
}

/// Runs a task that owns its panels from the first key to the last.
void run_panels(const ForwardCall& call, const Geometry& g, std::span<const HeadPanel> works, ForwardScratch& scratch) {
    TileTally tally(call);
    Range keys = works.front().keys;
    for (std::size_t i = 0; i < works.size(); ++i) {
        simd::load_queries(works[i].head, g, works[i].panel, scratch.q_t[i]);
        scratch.totals[i].started = false;
        if (keys.empty()) keys = works[i].keys;
        else if (!works[i].keys.empty())
            keys = {std::min(keys.begin, works[i].keys.begin), std::max(keys.end, works[i].keys.end)};
        if (call.counters != nullptr) count_skipped(works[i], g, tally);
    }
    std::vector<simd::PanelSums*> sums(works.size());
    for (std::int64_t chunk = keys.begin / kChunk; chunk * kChunk < keys.end; ++chunk) {
        // The first chunk of a panel is its total so far; later ones are merged into it.
        for (std::size_t i = 0; i < works.size(); ++i) {
            sums[i] = scratch.totals[i].started ? &scratch.chunks[i] : &scratch.totals[i];
        }
        run_chunk(works, g, chunk, scratch.q_t, scratch.tiles, sums, tally);
        for (std::size_t i = 0; i < works.size(); ++i) {
            if (sums[i] != &scratch.chunks[i] || !sums[i]->started) continue;
            merge_chunk(call, g, works[i], scratch.totals[i], *sums[i], chunk);
        }
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
        epilogue(call, g, works[i], scratch.q_t[i], scratch.tiles, scratch.totals[i], scratch.chunks[i]);
    }
}

void forward_whole(const ForwardCall& call, const Geometry& g, const WorkSplit& work_split,
                   const ForwardWorkspace& workspace) {
    run_unsplit(call, work_split, workspace.ends, [&](std::int64_t kv_head, Range panels, int worker) {
        std::vector<HeadPanel> works;
        works.reserve(kMaxPanels);  // a constant, so that memory does not depend on the task
        for (std::int64_t index = panels.begin; index < panels.end; ++index) {
            const HeadPanel work = panel_of(call, g, kv_head, index);
            if (work.panel.queries > 0) works.push_back(work);
        }
        if (works.empty()) return;
        ForwardScratch scratch = workspace.scratch(worker);
        run_panels(call, g, works, scratch);
    });
}

void forward_split(const ForwardCall& call, const Geometry& g, const WorkSplit& work_split,
                   const ForwardWorkspace& workspace) {
    const auto chunk_seen = [](const HeadPanel& work, std::int64_t chunk) {
        return work.panel.queries > 0 && !chunk_keys(work, chunk).empty();
    };
    const auto run = [&](std::int64_t kv_head, Range panels, std::int64_t chunk, int worker) {
        const ForwardScratch scratch = workspace.scratch(worker);
        const HeadPanel work = panel_of(call, g, kv_head, panels.begin);
        TileTally tally(call);
        if (call.counters != nullptr && chunk == 0 && work.panel.queries > 0) count_skipped(work, g, tally);
        if (!chunk_seen(work, chunk)) return;
        simd::load_queries(work.head, g, work.panel, scratch.q_t[0]);
        simd::PanelSums sums = workspace.partial(kv_head, panels.begin, chunk);
        simd::PanelSums* const pointer = &sums;
        run_chunk({&work, 1}, g, chunk, {scratch.q_t.data(), 1}, scratch.tiles, {&pointer, 1}, tally);
    };
    const auto merge = [&](std::int64_t kv_head, std::int64_t panel, int worker) {
        const ForwardScratch scratch = workspace.scratch(worker);
        const HeadPanel work = panel_of(call, g, kv_head, panel);
        if (work.panel.queries == 0) return;
        simd::PanelSums total = merge_chunks(
            work_split.chunks_of(work.head.sequence), scratch.totals[0],
            [&](std::int64_t chunk) { return chunk_seen(work, chunk); },
            [&](std::int64_t chunk) { return workspace.partial(kv_head, panel, chunk); },
            [&](simd::PanelSums& into, const simd::PanelSums& next, std::int64_t chunk) {
                merge_chunk(call, g, work, into, next, chunk);
            });
        simd::load_queries(work.head, g, work.panel, scratch.q_t[0]);
        epilogue(call, g, work, scratch.q_t[0], scratch.tiles, total, scratch.chunks[0]);
    };
    run_split_keys(
        call, work_split, workspace.ends, [&](const Sequence& m) { return work_split.panels_of(m); }, run, merge);
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    Arena arena;
    const Geometry g = geometry_of(plan);
    ForwardWorkspace(arena, plan.problem, g, work_split_of(plan, g));
    // An observed call is not decoded: it shows tiles with queries in the lanes.
    return decodes(plan) ? std::max(arena.used(), decode_workspace(plan)) : arena.used();
}

void forward(const ForwardCall& call) {
    if (call.observer == nullptr && decodes(call.plan)) return decode(call);
    const Geometry g = geometry_of(call.plan);
    const WorkSplit work_split = work_split_of(call.plan, g);
    Arena arena(call.workspace);
    const ForwardWorkspace workspace(arena, call.plan.problem, g, work_split);
    if (work_split.split) forward_split(call, g, work_split, workspace);
    else forward_whole(call, g, work_split, workspace);
}

}  // namespace tessera::cpu::fa2::simd_path
