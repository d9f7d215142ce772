// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward (FlashAttention-2 paper, Algorithm 1): Q blocks outer, K/V blocks inner; m, l and O stay in fast memory
// until the block is done, and O is written once. Parallel over batch, heads and Q blocks, and over K/V when those are
// fewer than the threads.
//
// The keys of a row are always summed in chunks of kChunk keys, each with its own (m, l, O), merged in rising order.
// Whether the chunks of a row are run by one task or by many changes nothing in that sum, so the bits of a row depend
// neither on the number of threads nor on its batch neighbours (docs/decisions/fixed-split.md).
#include <vector>

#include "core/split.hpp"
#include "cpu/fa2/rooms.hpp"
#include "cpu/lanes/step.hpp"

namespace tessera::cpu::fa2::in_lanes {
namespace {

constexpr std::int64_t kChunk = kSplitKeys;
constexpr std::int64_t kMaxPanels = 4;  // panels of a task: they share each K/V tile that is loaded
constexpr std::int64_t kTasksPerWorker = 4;

/// The sizes of this call. Lanes are independent of each other, so where tiles are fewer than threads the lanes of a
/// panel are dealt to several tasks; no bit of a row depends on who its neighbours in the lanes are.
Geometry geometry_of(const Plan& plan) {
    constexpr std::int64_t kFewestLanes = lanes::kLanes;
    Geometry g(plan);
    const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(plan.problem.len_kv, kChunk));
    const std::int64_t heads = plan.problem.batch * plan.problem.heads_q;
    while (g.block_q >= 2 * kFewestLanes && 2 * heads * g.panels * chunks <= worthwhile_threads(plan)) {
        g = Geometry(plan, ceil_div(g.block_q, 2 * kFewestLanes) * kFewestLanes);
    }
    return g;
}

/// How the panels are dealt out. The panels of a kv head are those of all query heads that share it, one after another.
struct Partition {
    std::int64_t panels_per_kv_head;
    std::int64_t panels_per_task = kMaxPanels;
    std::int64_t tasks_per_kv_head;
    std::int64_t kv_heads;  ///< of all batch members
    std::int64_t chunks;    ///< of the longest member
    int threads;            ///< that take part
    bool split;             ///< a task is one chunk of one panel, and a second loop merges

    Partition(const Plan& plan, const Geometry& g)
        : panels_per_kv_head(plan.problem.group() * g.panels),
          kv_heads(plan.problem.batch * plan.problem.heads_kv),
          chunks(ceil_div(plan.problem.len_kv, kChunk)),
          threads(worthwhile_threads(plan)) {
        const std::int64_t panels = kv_heads * panels_per_kv_head;
        while (panels_per_task > 1 && panels < panels_per_task * threads * kTasksPerWorker) panels_per_task /= 2;
        tasks_per_kv_head = ceil_div(panels_per_kv_head, panels_per_task);
        split = threads > 1 && chunks > 1 && panels < 2 * threads;
    }
};

/// Memory of one worker.
struct ForwardScratch {
    lanes::TileScratch tiles;
    std::vector<float*> q_t;               // per panel: [head_dim, lanes]
    std::vector<lanes::PanelSums> totals;  // per panel
    std::vector<lanes::PanelSums> chunks;  // per panel: of the chunk at hand

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
    const Partition& part;
    WorkerMemory workers;
    float* partials = nullptr;  // [panel, chunk, lanes::PanelSums], only when K/V is split

    ForwardWorkspace(Arena& arena, const Geometry& geometry, const Partition& partition)
        : g(geometry),
          part(partition),
          workers(arena, part.threads, [&](Arena& one) { ForwardScratch(one, g, part.panels_per_task); }) {
        if (part.split)
            partials =
                arena.take<float>(part.kv_heads * part.panels_per_kv_head, part.chunks, lanes::PanelSums::floats(g));
    }
    ForwardScratch scratch(int worker) const {
        Arena memory = workers.arena(worker);
        return {memory, g, part.panels_per_task};
    }
};

/// Panel `index` of kv head `kv_head` (of all batch members).
HeadPanel panel_of(const ForwardCall& call, const Geometry& g, std::int64_t kv_head, std::int64_t index) {
    const Problem& p = call.plan.problem;
    const Member member = member_of(p, call.args.cu_seqlens_q, call.args.cu_seqlens_kv, kv_head / p.heads_kv);
    const std::int64_t query_head = kv_head % p.heads_kv * p.group() + index / g.panels;
    return {Head(p, call.args, member, query_head), index % g.panels, g.block_q};
}

Range common(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

/// Runs the K/V tiles of one chunk for panels that share a kv head: K/V tile outer so that each is loaded once, the
/// panels inner. sums[i] receives the panel's result for this chunk alone.
void attend_chunk(std::span<const HeadPanel> works, const Geometry& g, std::int64_t chunk, std::span<float* const> q_t,
                  const lanes::TileScratch& tiles, std::span<lanes::PanelSums* const> sums, TileTally& tally) {
    for (lanes::PanelSums* s : sums) s->started = false;
    const Head& head = works.front().head;
    const Range all{chunk * kChunk, std::min(head.member.len_kv, (chunk + 1) * kChunk)};
    for (std::int64_t first = all.begin; first < all.end; first += g.block_kv) {
        const Range tile_keys{first, std::min(all.end, first + g.block_kv)};
        std::int64_t end = first;  // keys that some panel sees
        for (const HeadPanel& work : works) {
            const Range seen = common(tile_keys, work.keys);
            if (!seen.empty()) end = std::max(end, seen.end);
        }
        if (end == first) continue;
        const KvTile loaded = lanes::load_kv(head, g, first, end - first, tiles, works.size() == 1);
        for (std::size_t i = 0; i < works.size(); ++i) {
            const Range seen = common(tile_keys, works[i].keys);
            if (seen.empty()) continue;
            KvTile kv = loaded;
            kv.keys = seen.end - first;
            const Coverage coverage = works[i].head.coverage(works[i].panel, kv);
            lanes::online_softmax_step(works[i].head, g, works[i].panel, kv, coverage, q_t[i], tiles, *sums[i]);
            tally.ran(coverage, works[i].panel, kv);
            tally.tell([&] {
                TileReport report =
                    report_of(TileStep::values, works[i].head, works[i].panel, {first, seen.end}, coverage, *sums[i]);
                report.p = tiles.s;
                report.rescale = tiles.rescale;
                return report;
            });
        }
    }
}

void count_skipped(const HeadPanel& work, const Geometry& g, TileTally& tally) {
    for (std::int64_t chunk = 0; chunk * kChunk < work.head.member.len_kv; ++chunk) {
        const Range all{chunk * kChunk, std::min(work.head.member.len_kv, (chunk + 1) * kChunk)};
        for (std::int64_t first = all.begin; first < all.end; first += g.block_kv) {
            const bool seen = !common({first, std::min(all.end, first + g.block_kv)}, work.keys).empty();
            tally.skipped(1, seen ? 1 : 0);
        }
    }
}

/// The keys of a chunk that a panel sees.
Range chunk_keys(const HeadPanel& work, std::int64_t chunk) {
    return common({chunk * kChunk, (chunk + 1) * kChunk}, work.keys);
}

void tell_sums(const TileTally& tally, TileStep step, const HeadPanel& work, Range keys, const lanes::PanelSums& sums) {
    tally.tell([&] { return report_of(step, work.head, work.panel, keys, Coverage::full, sums); });
}

/// A task that owns its panels from the first key to the last.
void run_panels(const ForwardCall& call, const Geometry& g, std::span<const HeadPanel> works, ForwardScratch& scratch) {
    TileTally tally(call);
    Range keys = works.front().keys;
    for (std::size_t i = 0; i < works.size(); ++i) {
        lanes::load_queries(works[i].head, g, works[i].panel, scratch.q_t[i]);
        scratch.totals[i].started = false;
        if (keys.empty()) keys = works[i].keys;
        else if (!works[i].keys.empty())
            keys = {std::min(keys.begin, works[i].keys.begin), std::max(keys.end, works[i].keys.end)};
        if (call.counters != nullptr) count_skipped(works[i], g, tally);
    }
    std::vector<lanes::PanelSums*> sums(works.size());
    for (std::int64_t chunk = keys.begin / kChunk; chunk * kChunk < keys.end; ++chunk) {
        // The first chunk of a panel is its total so far; later ones are merged into it.
        for (std::size_t i = 0; i < works.size(); ++i) {
            sums[i] = scratch.totals[i].started ? &scratch.chunks[i] : &scratch.totals[i];
        }
        attend_chunk(works, g, chunk, scratch.q_t, scratch.tiles, sums, tally);
        for (std::size_t i = 0; i < works.size(); ++i) {
            if (sums[i] != &scratch.chunks[i] || !sums[i]->started) continue;
            const std::int64_t lanes = works[i].panel.lanes;
            lanes::merge(scratch.totals[i].state, scratch.totals[i].o, sums[i]->state, sums[i]->o, g.head_dim_v, lanes,
                         lanes);
            tell_sums(tally, TileStep::merge, works[i], chunk_keys(works[i], chunk), scratch.totals[i]);
        }
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
        lanes::normalise(works[i].head, g, works[i].panel, scratch.q_t[i], scratch.tiles, scratch.totals[i],
                         scratch.chunks[i].o);
        lanes::store_o_and_lse(works[i].head, g, works[i].panel, scratch.totals[i], scratch.tiles.rescale, call.args);
        tell_sums(tally, TileStep::finish, works[i], works[i].keys, scratch.totals[i]);
    }
}

void forward_whole(const ForwardCall& call, const Geometry& g, const Partition& part, ForwardWorkspace& workspace) {
    const std::int64_t tasks = part.kv_heads * part.tasks_per_kv_head;
    const bool later_is_longer = !call.plan.problem.mask.trivial();
    call.parallel_for(tasks, part.threads, [&](std::int64_t task, int worker) {
        // Under a causal mask the last panels see the most keys: they go first, of all heads, so that the loop ends
        // with short tasks. Otherwise neighbours in time share K and V.
        const std::int64_t kv_head = later_is_longer ? task % part.kv_heads : task / part.tasks_per_kv_head;
        const std::int64_t block =
            later_is_longer ? part.tasks_per_kv_head - 1 - task / part.kv_heads : task % part.tasks_per_kv_head;
        std::vector<HeadPanel> works;
        works.reserve(kMaxPanels);  // as much for one as for many
        const std::int64_t end = std::min(part.panels_per_kv_head, (block + 1) * part.panels_per_task);
        for (std::int64_t index = block * part.panels_per_task; index < end; ++index) {
            const HeadPanel work = panel_of(call, g, kv_head, index);
            if (work.panel.queries > 0) works.push_back(work);
        }
        if (works.empty()) return;
        ForwardScratch scratch = workspace.scratch(worker);
        run_panels(call, g, works, scratch);
    });
}

/// Few panels, many keys: one task per (panel, chunk), then one per panel that merges in the same order.
void forward_split(const ForwardCall& call, const Geometry& g, const Partition& part, ForwardWorkspace& workspace) {
    const std::int64_t panels = part.kv_heads * part.panels_per_kv_head;
    const auto partial = [&](std::int64_t panel, std::int64_t chunk) {
        return lanes::PanelSums(workspace.partials + (panel * part.chunks + chunk) * lanes::PanelSums::floats(g), g);
    };
    const auto chunk_seen = [](const HeadPanel& work, std::int64_t chunk) {
        return work.panel.queries > 0 && !chunk_keys(work, chunk).empty();
    };
    call.parallel_for(panels * part.chunks, part.threads, [&](std::int64_t task, int worker) {
        const ForwardScratch scratch = workspace.scratch(worker);
        const std::int64_t panel = task / part.chunks;
        const HeadPanel work = panel_of(call, g, panel / part.panels_per_kv_head, panel % part.panels_per_kv_head);
        TileTally tally(call);
        if (call.counters != nullptr && task % part.chunks == 0 && work.panel.queries > 0)
            count_skipped(work, g, tally);
        if (!chunk_seen(work, task % part.chunks)) return;
        lanes::load_queries(work.head, g, work.panel, scratch.q_t[0]);
        lanes::PanelSums sums = partial(panel, task % part.chunks);
        lanes::PanelSums* const pointer = &sums;
        attend_chunk({&work, 1}, g, task % part.chunks, {scratch.q_t.data(), 1}, scratch.tiles, {&pointer, 1}, tally);
    });
    call.parallel_for(panels, part.threads, [&](std::int64_t panel, int worker) {
        const ForwardScratch scratch = workspace.scratch(worker);
        const HeadPanel work = panel_of(call, g, panel / part.panels_per_kv_head, panel % part.panels_per_kv_head);
        if (work.panel.queries == 0) return;
        lanes::PanelSums total = scratch.totals[0];
        total.started = false;
        for (std::int64_t chunk = 0; chunk < part.chunks; ++chunk) {
            if (!chunk_seen(work, chunk)) continue;
            const lanes::PanelSums next = partial(panel, chunk);
            if (total.started) {
                lanes::merge(total.state, total.o, next.state, next.o, g.head_dim_v, work.panel.lanes,
                             work.panel.lanes);
                tell_sums(TileTally(nullptr, call.observer), TileStep::merge, work, chunk_keys(work, chunk), total);
            } else {
                total = next;
                total.started = true;
            }
        }
        lanes::load_queries(work.head, g, work.panel, scratch.q_t[0]);
        lanes::normalise(work.head, g, work.panel, scratch.q_t[0], scratch.tiles, total, scratch.chunks[0].o);
        lanes::store_o_and_lse(work.head, g, work.panel, total, scratch.tiles.rescale, call.args);
        tell_sums(TileTally(nullptr, call.observer), TileStep::finish, work, work.keys, total);
    });
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    Arena arena;
    const Geometry g = geometry_of(plan);
    ForwardWorkspace(arena, g, Partition(plan, g));
    return arena.used();
}

void forward(const ForwardCall& call) {
    const Geometry g = geometry_of(call.plan);
    const Partition part(call.plan, g);
    Arena arena(call.workspace);
    ForwardWorkspace workspace(arena, g, part);
    if (part.split) forward_split(call, g, part, workspace);
    else forward_whole(call, g, part, workspace);
}

}  // namespace tessera::cpu::fa2::in_lanes
