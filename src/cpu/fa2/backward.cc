// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward (FlashAttention-2 paper, Algorithm 2): K/V blocks outer, Q blocks inner, and parallel over K/V blocks
// too. The paper adds to dQ with atomics, whose order differs from run to run. Here the order of every sum is fixed:
//
//   Panel i and key tile j meet in round (i - j) mod n, n the larger number of the two: a Latin square. dQ of a panel
//   is summed over j = i, i-1, ..., 0, n-1, ..., i+1, and dK, dV of a tile over i = j, j+1, ..., n-1, 0, ..., j-1.
//
// Heads enough for all threads: one task runs a head, once for the queries i >= j and once for i < j, in groups of key
// tiles from the last to the first, panels rising and for each panel the group's tiles falling. That visits both orders
// above, and a panel that was read serves the whole group. Fewer heads: round by round, all tiles of a round at once;
// no two of them share a panel or a key tile. Same order, same bits (docs/decisions/deterministic-backward.md).
#include "cpu/gradient.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {
namespace {

/// One query head in tiles.
struct Grid {
    Head head;
    std::int64_t panels;
    std::int64_t key_tiles;
    std::int64_t rounds;

    Grid(const BackwardCall& call, const Geometry& g, const Member& member, std::int64_t query_head)
        : head(call.plan.problem, call.args, member, query_head),
          panels(ceil_div(member.len_q, g.block_q)),
          key_tiles(ceil_div(member.len_kv, g.block_kv)),
          rounds(std::max(panels, key_tiles)) {}

    Range keys(const Geometry& g, std::int64_t j) const {
        return {j * g.block_kv, std::min(head.member.len_kv, (j + 1) * g.block_kv)};
    }
};

/// Key tiles that a worker keeps loaded while the panels pass: with 4, at head_dim 128, they and their dK, dV take 512
/// KiB of the second-level cache, and the panels, which stream from the third, are read a quarter as often.
constexpr std::int64_t kColumns = 4;

/// Tile j of loaded key tiles.
KvTile slice(const KvTile& loaded, const Range& keys) {
    KvTile kv = loaded;
    kv.first = keys.begin;
    kv.keys = keys.size();
    kv.k += (keys.begin - loaded.first) * loaded.k_stride;
    kv.v += (keys.begin - loaded.first) * loaded.v_stride;
    return kv;
}

/// Key tiles `columns` against `panels`: panels rising, for each the tiles falling, pairs that take(i, j) leaves out
/// not.
template <class Take>
void run_columns(const Grid& grid, const Geometry& g, Range columns, Range panels, const GradientMemory& memory,
                 const GradientScratch& scratch, TileTally& tally, const Take& take) {
    if (panels.empty()) return;
    const Head& head = grid.head;
    const Range keys{grid.keys(g, columns.begin).begin, grid.keys(g, columns.end - 1).end};
    const bool reused = panels.size() > 1;
    KvTile loaded{};
    for (std::int64_t i = panels.begin; i < panels.end; ++i) {
        const Panel panel(i, g.block_q, head.member.len_q);
        for (std::int64_t j = columns.end; j-- > columns.begin;) {
            if (!take(i, j)) continue;
            const Range tile_keys = grid.keys(g, j);
            const Coverage coverage =
                head.band.coverage(panel.first, panel.first + panel.queries, tile_keys.begin, tile_keys.end);
            if (coverage == Coverage::empty) {
                tally.skipped(1, 0);
                continue;
            }
            if (loaded.keys == 0) loaded = load_kv(head, g, keys.begin, keys.size(), scratch, !reused);
            backward_tile(head, g, panel, slice(loaded, tile_keys), coverage, memory.panel(head, i), scratch,
                          memory.dk(head.member, head.kv_head, tile_keys.begin),
                          memory.dv(head.member, head.kv_head, tile_keys.begin));
            tally.ran(coverage);
        }
    }
}

void run_whole_head(const Grid& grid, const Geometry& g, const GradientMemory& memory, const GradientScratch& scratch,
                    TileTally& tally) {
    const auto sweep = [&](bool queries_from_diagonal) {
        for (std::int64_t end = grid.key_tiles; end > 0; end -= std::min(end, kColumns)) {
            const Range columns{std::max<std::int64_t>(0, end - kColumns), end};
            const Range panels = queries_from_diagonal ? Range{columns.begin, grid.panels}
                                                       : Range{0, std::min(columns.end - 1, grid.panels)};
            run_columns(grid, g, columns, panels, memory, scratch, tally,
                        [&](std::int64_t i, std::int64_t j) { return (i >= j) == queries_from_diagonal; });
        }
    };
    sweep(true);
    sweep(false);
}

/// The one panel that meets key tile j in this round.
void run_round(const Grid& grid, const Geometry& g, std::int64_t round, std::int64_t j, const GradientMemory& memory,
               const GradientScratch& scratch, TileTally& tally) {
    if (round >= grid.rounds || j >= grid.key_tiles) return;
    const std::int64_t i = (j + round) % grid.rounds;
    if (i >= grid.panels) return;
    run_columns(grid, g, {j, j + 1}, {i, i + 1}, memory, scratch, tally,
                [](std::int64_t, std::int64_t) { return true; });
}

/// Heads enough to keep all threads busy to the end, with one task each.
bool heads_fill_threads(std::int64_t kv_heads, int threads) {
    constexpr std::int64_t kEven = 4;  // tasks per thread from which an uneven rest no longer matters
    return kv_heads >= threads && (kv_heads % threads == 0 || kv_heads >= kEven * threads);
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    BackwardWorkspace(arena, plan, Geometry(plan), kColumns);
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    BackwardWorkspace workspace(arena, call.plan, g, kColumns);
    const GradientMemory& memory = workspace.memory;
    workspace.memory.prepare(call);

    const std::int64_t kv_heads = p.batch * p.heads_kv;
    const auto grid_of = [&](std::int64_t kv_head, std::int64_t in_group) {
        return Grid(call, g, member_of(call, kv_head / p.heads_kv), kv_head % p.heads_kv * p.group() + in_group);
    };
    if (heads_fill_threads(kv_heads, call.plan.threads)) {
        call.parallel_for(kv_heads, call.plan.threads, [&](std::int64_t kv_head, int worker) {
            TileTally tally(call.counters);
            for (std::int64_t in_group = 0; in_group < p.group(); ++in_group) {
                run_whole_head(grid_of(kv_head, in_group), g, memory,
                               workspace.workers[static_cast<std::size_t>(worker)], tally);
            }
        });
    } else {
        const std::int64_t key_tiles = ceil_div(p.len_kv, g.block_kv);
        const std::int64_t rounds = p.len_q == 0 ? 0 : std::max(g.panels, key_tiles);
        for (std::int64_t in_group = 0; in_group < p.group(); ++in_group) {
            for (std::int64_t round = 0; round < rounds; ++round) {
                call.parallel_for(kv_heads * key_tiles, call.plan.threads, [&](std::int64_t task, int worker) {
                    TileTally tally(call.counters);
                    run_round(grid_of(task % kv_heads, in_group), g, round, task / kv_heads, memory,
                              workspace.workers[static_cast<std::size_t>(worker)], tally);
                });
            }
        }
    }
    workspace.bias.run(call, memory, workspace.workers);
    workspace.memory.finish(call);
}

}  // namespace tessera::cpu::fa2
