// SPDX-License-Identifier: Apache-2.0
//
// Helpers of the schedules for emitting their steps: sizes in bytes, and the loops over sequences and heads.
#pragma once

#include "schedule/grid.hpp"
#include "schedule/schedule.hpp"

namespace tessera::schedule {

/// Bytes of an element of sums in slow memory (O of fa1, dQ, S), and of m, l, LSE, D.
inline constexpr std::int64_t kSum = 4;

/// Row sizes in bytes.
struct Sizes {
    std::int64_t d, dv;  ///< head_dim, head_dim_v in elements
    std::int64_t e;      ///< bytes of an element
    std::int64_t q, v;   ///< bytes of a row of Q, K, dQ, dK; and of V, O, dO, dV

    explicit Sizes(const Problem& p)
        : d(p.head_dim), dv(p.head_dim_v), e(size_of(p.dtype)), q(p.head_dim * e), v(p.head_dim_v * e) {}

    std::int64_t state() const { return kSum * dv + 2 * kSum; }  ///< O in fp32, m and l of one query
};

/// Emits the steps of one workload, or of a part of it.
class Emitter {
 public:
    Emitter(const Workload& workload, const Visitor& visit)
        : workload_(workload), sizes_(workload.problem), visit_(visit) {}

    const Workload& workload() const { return workload_; }
    const Sizes& sizes() const { return sizes_; }

    void at(std::int64_t sequence, std::int64_t query_head) {
        step_.sequence = sequence;
        step_.query_head = query_head;
    }
    /// A step that moves or computes something for these queries and keys.
    void emit(Operation operation, Range queries, Range keys, unsigned touches, const Work& work,
              Coverage coverage = Coverage::full) {
        step_.operation = operation;
        step_.queries = queries;
        step_.keys = keys;
        step_.touches = touches;
        step_.work = work;
        step_.coverage = coverage;
        visit_(step_);
    }

 private:
    const Workload& workload_;
    Sizes sizes_;
    const Visitor& visit_;
    Step step_{};
};

/// Bytes moved between fast and slow memory; they cross DRAM if `first`.
constexpr Work moved(std::int64_t bytes, bool first, std::int64_t shared = 0) {
    return {.bytes = {.dram = first ? bytes : 0, .l2 = bytes, .shared = shared}};
}
constexpr Work computed(std::int64_t flop, std::int64_t shared, std::int64_t exps = 0) {
    return {.bytes = {.shared = shared}, .flop = flop, .exps = exps};
}

/// One kv head of one sequence.
struct KvHead {
    std::int64_t sequence;
    Grid grid;
    std::int64_t first_query_head;
    std::int64_t group;
};

/// The position of a step: a tile of queries and a tile of keys.
struct TilePosition {
    std::int64_t i = 0;
    std::int64_t j = 0;
    Range queries{};
    Range loaded{};      ///< keys of the whole tile
    Range computed{};    ///< keys that are computed
    bool first = false;  ///< the inner loop's loads are not in the L2 yet

    std::int64_t elements() const { return queries.size() * computed.size(); }
};

/// Calls row(i, queries) for every tile of queries of the group's heads, in order.
template <class Row>
void for_each_row(Emitter& out, const KvHead& kv, const Row& row) {
    for (std::int64_t h = 0; h < kv.group; ++h) {
        out.at(kv.sequence, kv.first_query_head + h);
        for (std::int64_t i = 0; i < kv.grid.rows(); ++i) row(i, kv.grid.queries(i));
    }
}

/// Calls tile(TilePosition) for every tile of row i, in order.
template <class Tile>
void for_each_tile(const Grid& grid, std::int64_t i, FirstReads& reads, const Tile& tile) {
    reads.begin(i);
    const Range columns = grid.columns_of(i);
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
        tile(TilePosition{i, j, grid.queries(i), grid.keys(j), grid.computed(i, j), reads.first(j)});
    }
}

/// A schedule as data. Its file defines NAME_order(); schedule.cc lists all from TESSERA_SCHEDULES.
struct Order {
    void (*forward_steps)(Emitter& emitter);
    void (*backward_steps)(Emitter& emitter);
    Cost (*forward_cost)(const Workload& workload);
    Cost (*backward_cost)(const Workload& workload);
    /// Bytes of workspace in slow memory.
    std::int64_t (*forward_workspace)(const Workload& workload);
    std::int64_t (*backward_workspace)(const Workload& workload);
    /// Queries of one reader of shared memory. Each reader fetches the whole K and V tile.
    std::int64_t rows_per_reader = 32;  ///< a warp with two fragments of 16 rows
};
#define TESSERA_ORDER(name) Order name##_order();
TESSERA_SCHEDULES(TESSERA_ORDER)
#undef TESSERA_ORDER
const Order& order_of(Schedule schedule);

/// The FirstReads of K and V.
inline FirstReads reads_of_keys(const Workload& w) {
    return FirstReads(w.residency.keys ? 0 : std::max<std::int64_t>(w.residency.tiles_at_once, 1));
}

/// The number of readers of shared memory for a tile of queries (backward: of keys).
inline std::int64_t readers(const Workload& w, const Range& rows) {
    return ceil_div(rows.size(), order_of(w.schedule).rows_per_reader);
}

/// Calls body(KvHead) for every kv head of every sequence.
template <class Body>
void for_each_kv_head(const Workload& workload, bool trimmed, const Body& body) {
    const Problem& p = workload.problem;
    std::int64_t sequence = 0;
    for (const auto& [lengths, times] : distinct_sequences(workload)) {
        const Grid grid{p.mask.bind(lengths.first, lengths.second), workload.tile, trimmed};
        for (std::int64_t n = 0; n < times; ++n, ++sequence) {
            for (std::int64_t h = 0; h < p.heads_kv; ++h) body(KvHead{sequence, grid, h * p.group(), p.group()});
        }
    }
}

/// The sum of body(grid), the Cost of one kv head with its query heads, over all kv heads; tile counts are added.
template <class Body>
Cost sum_over_kv_heads(const Workload& workload, bool trimmed, const Body& body) {
    const Problem& p = workload.problem;
    Cost total;
    for (const auto& [lengths, times] : distinct_sequences(workload)) {
        const Grid grid{p.mask.bind(lengths.first, lengths.second), workload.tile, trimmed};
        total += times * p.heads_kv * body(grid);
    }
    return total;
}

/// Tile counts, elements and pairs of one head in closed form.
Cost tile_counts(const Grid& grid);

/// Rows of K (or V) that cross DRAM for one kv head if tiles of queries are the outer loop: once if they stay in the
/// L2. Otherwise once for every tiles_at_once tiles of queries, and for every query head.
std::int64_t first_reads_of_keys(const Workload& workload, const Grid& grid);

/// The sums over all key tiles that one tile of queries touches.
struct RowOfTiles {
    std::int64_t rows = 0;         ///< queries
    std::int64_t readers = 0;      ///< warps or warpgroups that read K and V for these queries
    std::int64_t tiles = 0;        ///< key tiles
    std::int64_t loaded = 0;       ///< keys in whole tiles
    std::int64_t computed = 0;     ///< keys to the last one seen
    std::int64_t key_readers = 0;  ///< readers whose rows are keys, summed over the tiles
};
RowOfTiles row_of_tiles(const Workload& workload, const Grid& grid, std::int64_t i);

// Functions of several files: the backward passes, and the parts of fa2 that fa3 uses.
void standard_backward_steps(Emitter& emitter);
void fa1_backward_steps(Emitter& emitter);
void fa2_backward_steps(Emitter& emitter);
Cost standard_backward_cost(const Workload& workload);
Cost fa1_backward_cost(const Workload& workload);
Cost fa2_forward_cost(const Workload& workload);
Cost fa2_backward_cost(const Workload& workload);
std::int64_t no_workspace(const Workload& workload);
std::int64_t fa2_backward_workspace(const Workload& workload);  ///< dQ and D in fp32

}  // namespace tessera::schedule
