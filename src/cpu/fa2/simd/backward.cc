// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward (FlashAttention-2 paper, Algorithm 2): K/V blocks outer, Q blocks inner, and parallel over K/V blocks
// too. The paper adds to dQ with atomics, in an order that differs from run to run. This kernel fixes the order of
// every sum:
//
//   Panel i and key tile j run in round (i - j) mod n, n the larger number of the two: a Latin square. dQ of a panel
//   is summed over j = i, i-1, ..., 0, n-1, ..., i+1, and dK, dV of a tile over i = j, j+1, ..., n-1, 0, ..., j-1.
//
// With enough heads for all threads, one task runs a head, once for the pairs i >= j and once for i < j. It goes over
// groups of key tiles from the last group to the first, in a group over the panels in ascending order, and for each
// panel over the group's tiles in descending order. This follows both orders above, and each panel read serves the
// whole group. With fewer heads, all pairs of a round run at once, round by round; no two of them share a panel or a
// key tile. If there are enough pairs, a pair is a square of several panels and key tiles, so that data read from
// memory serves more than once. Squares on the diagonal run i >= j in the first round and i < j in an extra round at
// the end. The order and the bits are the same (docs/decisions/deterministic-backward.md).
#include "cpu/fa2/paths.hpp"

#include "core/split.hpp"
#include "cpu/steps/simd/gradient.hpp"

namespace tessera::cpu::fa2::simd_path {
namespace {

/// One query head in tiles.
struct Grid {
    Head head;
    std::int64_t panels;
    std::int64_t key_tiles;

    Grid(const BackwardCall& call, const Geometry& g, const Sequence& sequence, std::int64_t query_head)
        : head(call.plan.problem, call.args, sequence, query_head),
          panels(ceil_div(sequence.len_q, g.block_q)),
          key_tiles(ceil_div(sequence.len_kv, g.block_kv)) {}

    Range keys(const Geometry& g, std::int64_t j) const {
        return {j * g.block_kv, std::min(head.sequence.len_kv, (j + 1) * g.block_kv)};
    }
};

using simd_split::kColumns, simd_split::kSquaresPerThread;

/// Tile j of loaded key tiles.
KvTile slice(const KvTile& loaded, const Range& keys) {
    KvTile kv = loaded;
    kv.first = keys.begin;
    kv.keys = keys.size();
    kv.k += (keys.begin - loaded.first) * loaded.k_stride;
    kv.v += (keys.begin - loaded.first) * loaded.v_stride;
    return kv;
}

/// Runs key tiles `columns` against `panels`: panels in ascending order, for each the tiles in descending order. Pairs
/// that take(i, j) rejects are skipped.
template <class Take>
void run_columns(const Grid& grid, const Geometry& g, Range columns, Range panels, const simd::GradientMemory& memory,
                 const simd::GradientScratch& scratch, TileTally& tally, const Take& take) {
    const Head& head = grid.head;
    const Range keys{grid.keys(g, columns.begin).begin, grid.keys(g, columns.end - 1).end};
    const Range queries = head.band.q_range(keys.begin, keys.end);
    if (queries.empty()) return;
    panels = {std::max(panels.begin, queries.begin / g.block_q),
              std::min(panels.end, ceil_div(queries.end, g.block_q))};
    KvTile loaded{};
    for (std::int64_t i = panels.begin; i < panels.end; ++i) {
        const Panel panel(i, g.block_q, head.sequence.len_q);
        for (std::int64_t j = columns.end; j-- > columns.begin;) {
            if (!take(i, j)) continue;
            const Range tile_keys = grid.keys(g, j);
            const Coverage coverage =
                head.band.coverage(panel.first, panel.first + panel.queries, tile_keys.begin, tile_keys.end);
            if (coverage == Coverage::empty) continue;
            if (loaded.keys == 0) loaded = simd::load_kv(head, g, keys.begin, keys.size(), scratch, panels.size() == 1);
            const KvTile kv = slice(loaded, tile_keys);
            const simd::GradientPanel from = memory.panel(head, i);
            float* dk = memory.dk(head.sequence, head.kv_head, tile_keys.begin);
            float* dv = memory.dv(head.sequence, head.kv_head, tile_keys.begin);
            simd::backward_tile(head, g, panel, kv, coverage, from, scratch, dk, dv);
            tally.ran(coverage, panel, kv);
            tally.report([&] { return report_of(head, g, panel, kv, coverage, from, scratch, dk, dv); });
            memory.added_to_keys(head, tile_keys);
            memory.added_to_queries(head, i);
        }
    }
}

void run_whole_head(const Grid& grid, const Geometry& g, const simd::GradientMemory& memory,
                    const simd::GradientScratch& scratch, TileTally& tally) {
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

/// The squares of a grid: `side` panels by `side` key tiles.
struct Squares {
    const Grid& grid;
    std::int64_t side;
    std::int64_t rows;      ///< rows of squares, along the panels
    std::int64_t columns;   ///< columns of squares, along the key tiles
    std::int64_t diagonal;  ///< number of rounds of whole squares; also the round of i < j on the diagonal

    Squares(const Grid& of, std::int64_t tiles_per_side)
        : grid(of),
          side(tiles_per_side),
          rows(ceil_div(of.panels, side)),
          columns(ceil_div(of.key_tiles, side)),
          diagonal(std::max(rows, columns)) {}

    /// The round of panel i and key tile j.
    std::int64_t round_of(std::int64_t i, std::int64_t j) const {
        if (i / side == j / side) return i >= j ? 0 : diagonal;
        return (i / side - j / side + diagonal) % diagonal;
    }
};

/// Runs square `index` of the squares_of() a round. The index counts along the shorter side of the grid, so that none
/// is outside it.
void run_square(const Squares& squares, const Geometry& g, std::int64_t round, std::int64_t index,
                const simd::GradientMemory& memory, const simd::GradientScratch& scratch, TileTally& tally) {
    const Grid& grid = squares.grid;
    const std::int64_t n = squares.diagonal;
    const bool along_keys = squares.columns <= squares.rows;
    const std::int64_t row = along_keys ? (index + round) % n : index;
    const std::int64_t column = along_keys ? index : (index - round + n) % n;
    const std::int64_t side = squares.side;
    run_columns(grid, g, {column * side, std::min(grid.key_tiles, (column + 1) * side)},
                {row * side, std::min(grid.panels, (row + 1) * side)}, memory, scratch, tally,
                [&](std::int64_t i, std::int64_t j) { return squares.round_of(i, j) == round; });
}

/// The number of squares of one round.
std::int64_t squares_of(const Squares& squares, std::int64_t round) {
    return round > squares.diagonal ? 0 : std::min(squares.rows, squares.columns);
}

/// Sets used[round] for the rounds in which some tile of the grid is not empty.
void mark_rounds(const Squares& squares, const Geometry& g, char* used) {
    const Grid& grid = squares.grid;
    for (std::int64_t j = 0; j < grid.key_tiles; ++j) {
        const Range keys = grid.keys(g, j);
        const Range queries = grid.head.band.q_range(keys.begin, keys.end);
        if (queries.empty()) continue;
        for (std::int64_t i = queries.begin / g.block_q; i * g.block_q < queries.end; ++i) {
            used[squares.round_of(i, j)] = 1;
        }
    }
}

/// Memory of a call.
struct RoundsWorkspace : simd::BackwardWorkspace {
    std::int64_t rounds;  // upper bound: the longest sequence that the Problem allows, in squares of one tile
    char* used;           // [rounds]

    RoundsWorkspace(Arena& arena, const Plan& plan, const Geometry& g)
        : simd::BackwardWorkspace(arena, plan, g, kColumns),
          rounds(std::max(g.panels, ceil_div(plan.problem.len_kv, g.block_kv)) + 1),
          used(arena.take<char>(rounds)) {}
};

/// The tiles of one call: whole heads at once, or round by round.
class BackwardRun {
 public:
    BackwardRun(const BackwardCall& call, const Geometry& g, const RoundsWorkspace& workspace)
        : call_(call), g_(g), workspace_(workspace), kv_heads_(call.plan.problem.batch * call.plan.problem.heads_kv) {}

    void all() {
        if (heads_fill_threads(kv_heads_, worthwhile_threads(call_.plan))) heads();
        else rounds();
        if (call_.counters != nullptr) report();
    }

 private:
    Grid grid(std::int64_t kv_head, std::int64_t in_group) const {
        const Problem& p = call_.plan.problem;
        return Grid(call_, g_, sequence_of(call_, kv_head / p.heads_kv), kv_head % p.heads_kv * p.group() + in_group);
    }
    const simd::GradientScratch& scratch(int worker) const {
        return workspace_.workers[static_cast<std::size_t>(worker)];
    }

    void heads() {
        call_.parallel_for(kv_heads_, worthwhile_threads(call_.plan), [&](std::int64_t kv_head, int worker) {
            TileTally tally(&ran_, call_.observer);
            for (std::int64_t in_group = 0; in_group < call_.plan.problem.group(); ++in_group) {
                run_whole_head(grid(kv_head, in_group), g_, workspace_.memory, scratch(worker), tally);
            }
        });
    }

    void rounds() {
        const Problem& p = call_.plan.problem;
        if (kv_heads_ == 0 || p.heads_q == 0) return;
        const std::int64_t sequences = p.ragged ? p.batch : 1;
        std::int64_t pairs = 0;   // tiles of a round of the largest sequence
        std::int64_t rounds = 0;  // rounds of the longest sequence, in squares of one tile
        for (std::int64_t b = 0; b < sequences; ++b) {
            const Grid of_sequence = grid(b * p.heads_kv, 0);
            pairs = std::max(pairs, std::min(of_sequence.panels, of_sequence.key_tiles));
            rounds = std::max(rounds, std::max(of_sequence.panels, of_sequence.key_tiles) + 1);
        }
        const int threads = worthwhile_threads(call_.plan);
        std::int64_t side = kColumns;
        while (side > 1 && kv_heads_ * ceil_div(pairs, side) < kSquaresPerThread * threads) side /= 2;
        std::fill_n(workspace_.used, rounds, char{0});
        for (std::int64_t b = 0; b < sequences; ++b) {
            const Grid of_sequence = grid(b * p.heads_kv, 0);
            mark_rounds(Squares(of_sequence, side), g_, workspace_.used);
        }
        for (std::int64_t in_group = 0; in_group < p.group(); ++in_group) {
            for (std::int64_t round = 0; round < rounds; ++round) {
                if (workspace_.used[round] != 0) run_round(round, side, in_group, threads);
            }
        }
    }

    /// Runs one round for query head `in_group` of each kv head.
    void run_round(std::int64_t round, std::int64_t side, std::int64_t in_group, int threads) {
        const std::int64_t heads_kv = call_.plan.problem.heads_kv;
        const HeadTasks squares(call_, heads_kv, workspace_.memory.task_ends(), [&](const Sequence& m) {
            const Grid of_sequence = grid(m.batch * heads_kv, in_group);
            return squares_of(Squares(of_sequence, side), round);
        });
        call_.parallel_for(squares.total(), threads, [&](std::int64_t index, int worker) {
            const HeadTask task = squares.by_index(index);
            TileTally tally(&ran_, call_.observer);
            const Grid of_head = grid(task.head, in_group);
            run_square(Squares(of_head, side), g_, round, task.index, workspace_.memory, scratch(worker), tally);
        });
    }

    /// Counts the tiles that ran, and the others as skipped.
    void report() {
        std::int64_t all = 0;
        for (std::int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
            const Grid of_head = grid(kv_head, 0);
            all += of_head.panels * of_head.key_tiles * call_.plan.problem.group();
        }
        call_.counters->full += ran_.full;
        call_.counters->partial += ran_.partial;
        call_.counters->computed_pairs += ran_.computed_pairs;
        call_.counters->skipped += all - ran_.full - ran_.partial;
    }

    const BackwardCall& call_;
    const Geometry& g_;
    const RoundsWorkspace& workspace_;
    std::int64_t kv_heads_;
    TileCounters ran_;
};

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    RoundsWorkspace(arena, plan, Geometry(plan));
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    RoundsWorkspace workspace(arena, call.plan, g);
    workspace.prepare(call);
    BackwardRun(call, g, workspace).all();
    workspace.bias.run(call, workspace.memory, workspace.workers);
    workspace.memory.finish(call);
}

}  // namespace tessera::cpu::fa2::simd_path
