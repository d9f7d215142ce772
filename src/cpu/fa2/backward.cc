// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward (FlashAttention-2 paper, Algorithm 2): K/V blocks outer, Q blocks inner, and parallel over K/V blocks
// too. The paper adds to dQ with atomics, whose order differs from run to run. Here the order of every sum is fixed:
//
//   Panel i and key tile j meet in round (i - j) mod n, n the larger number of the two: a Latin square. dQ of a panel
//   is summed over j = i, i-1, ..., 0, n-1, ..., i+1, and dK, dV of a tile over i = j, j+1, ..., n-1, 0, ..., j-1.
//
// Heads enough for all threads: one task runs a head, column by column, from the last key tile to the first, once for
// the queries i >= j and once for i < j; that visits both orders above, and each K/V tile is loaded twice. Fewer heads:
// round by round, all tiles of a round at once; no two of them share a panel or a key tile. Same order, same bits
// (docs/decisions/deterministic-backward.md).
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

/// Key tile j against the panels that see it among `panels`, in rising order.
void run_column(const Grid& grid, const Geometry& g, std::int64_t j, Range panels, const GradientMemory& memory,
                const GradientScratch& scratch, TileTally& tally) {
    const Head& head = grid.head;
    const Range keys = grid.keys(g, j);
    const Range queries = head.band.q_range(keys.begin, keys.end);
    Range touched{};
    if (!queries.empty()) {
        touched = {std::max(panels.begin, queries.begin / g.block_q),
                   std::min(panels.end, ceil_div(queries.end, g.block_q))};
    }
    tally.skipped(panels.size(), touched.size());
    if (touched.empty()) return;
    const KvTile kv = load_kv(head, g, keys.begin, keys.size(), scratch, touched.size() == 1);
    for (std::int64_t i = touched.begin; i < touched.end; ++i) {
        const Panel panel(i, g.block_q, head.member.len_q);
        const Coverage coverage = head.coverage(panel, kv);
        backward_tile(head, g, panel, kv, coverage, memory.panel(head, i), scratch,
                      memory.dk(head.member, head.kv_head, keys.begin),
                      memory.dv(head.member, head.kv_head, keys.begin));
        tally.ran(coverage);
    }
}

void run_whole_head(const Grid& grid, const Geometry& g, const GradientMemory& memory, const GradientScratch& scratch,
                    TileTally& tally) {
    for (std::int64_t j = grid.key_tiles; j-- > 0;) run_column(grid, g, j, {j, grid.panels}, memory, scratch, tally);
    for (std::int64_t j = grid.key_tiles; j-- > 0;)
        run_column(grid, g, j, {0, std::min(j, grid.panels)}, memory, scratch, tally);
}

/// The one panel that meets key tile j in this round.
void run_round(const Grid& grid, const Geometry& g, std::int64_t round, std::int64_t j, const GradientMemory& memory,
               const GradientScratch& scratch, TileTally& tally) {
    if (round >= grid.rounds || j >= grid.key_tiles) return;
    const std::int64_t i = (j + round) % grid.rounds;
    if (i < grid.panels) run_column(grid, g, j, {i, i + 1}, memory, scratch, tally);
}

/// Heads enough to keep all threads busy to the end, with one task each.
bool heads_fill_threads(std::int64_t kv_heads, int threads) {
    constexpr std::int64_t kEven = 4;  // tasks per thread from which an uneven rest no longer matters
    return kv_heads >= threads && (kv_heads % threads == 0 || kv_heads >= kEven * threads);
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    BackwardWorkspace(arena, plan, Geometry(plan));
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    BackwardWorkspace workspace(arena, call.plan, g);
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
