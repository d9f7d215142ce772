// SPDX-License-Identifier: Apache-2.0
//
// Backward of fa1 (FlashAttention paper, Algorithm 4), fa2 and fa3 (FlashAttention-2 paper, Algorithm 2;
// FlashAttention-3 paper, Appendix B.1): tiles of keys outer, tiles of queries inner. dK and dV stay in fast memory
// over all query heads that share a kv head. dQ lies in slow memory as fp32. Per query head, with t_j the queries of
// the tiles that tile j touches:
//   fa1         inner loop: sum over j of t_j (e (d + 2 d_v) + 4 + 8 d)      Q, dO, O, LSE; dQ read and written back
//   fa2, fa3    before: O and dO read for D = rowsum(dO * O), D and dQ = 0 written: N_q (2 e d_v + 4 + 4 d)
//               inner loop: sum over j of t_j (e (d + d_v) + 8 + 4 d)        Q, dO, LSE, D; dQ added to in the L2
//   both        K, V once for the group: e N_k (d + d_v); dK, dV the same; dQ to the dtype: N_q (4 d + e d)
// Five GEMMs per pair: 2 (3 d + 2 d_v) FLOP. S is recomputed, which adds one exp per pair.
//
// Shared memory traffic per tile (queries R, keys w, g readers of keys): S^T and dP^T read the keys' rows once and the
// queries' rows once per reader. dV and dK read the queries' rows per reader. dQ reads dS per reader and K once. dS is
// written once, and dQ passes through in fp32.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

/// Bytes of a query's row in the inner loop.
struct RowBytes {
    std::int64_t q, gradients, dq;

    RowBytes(const Workload& w, const Sizes& z)
        : q(z.q),
          gradients(w.schedule == Schedule::fa1 ? 2 * z.v + kSum : z.v + 2 * kSum),
          dq(kSum * z.d * (w.schedule == Schedule::fa1 ? 2 : 1)) {}
};

struct SharedBytes {
    std::int64_t scores, dv, dp, dq, dk, add_dq;

    SharedBytes(const Sizes& z, std::int64_t readers, std::int64_t rows, std::int64_t keys)
        : scores(keys * z.q + readers * rows * z.q),
          dv(readers * rows * z.v),
          dp(keys * z.v + readers * rows * z.v + rows * keys * z.e),
          dq(readers * rows * keys * z.e + keys * z.q),
          dk(readers * rows * z.q),
          add_dq(2 * kSum * rows * z.d) {}
    std::int64_t sum() const { return scores + dv + dp + dq + dk + add_dq; }
};

void run_tile(Emitter& out, const Grid& grid, std::int64_t i, std::int64_t j, bool first) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    const RowBytes row(w, z);
    const Range q = grid.queries(i);
    const Range k = grid.computed(i, j);
    const std::int64_t n = q.size();
    const std::int64_t pairs = grid.pairs(i, j);
    const SharedBytes shared(z, readers(w, k), n, k.size());
    const bool far = !w.residency.queries && first;
    // fa2 and fa3 have read dO for D, so it comes from DRAM again only if it did not stay in the L2.
    Work gradients = moved(n * row.gradients, far, n * z.v);
    if (w.residency.queries && first) gradients.bytes.dram = n * (w.schedule == Schedule::fa1 ? row.gradients : kSum);
    Work add = moved(n * row.dq, false, shared.add_dq);
    if (far) add.bytes.dram = n * 2 * kSum * z.d;
    out.emit(Operation::load_q, q, {}, kNothing, moved(n * row.q, first, n * z.q));
    out.emit(Operation::load_gradients, q, {}, kNothing, gradients);
    out.emit(Operation::scores, q, k, kS, computed(2 * z.d * pairs, shared.scores), grid.coverage(i, j));
    out.emit(Operation::weights_again, q, k, kP, computed(0, 0, pairs));
    out.emit(Operation::dv_product, q, k, kDv, computed(2 * z.dv * pairs, shared.dv));
    out.emit(Operation::dp_product, q, k, kS, computed(2 * z.dv * pairs, shared.dp));
    out.emit(Operation::dq_product, q, k, kDq, computed(2 * z.d * pairs, shared.dq));
    out.emit(Operation::add_dq, q, {}, kDq, add);
    out.emit(Operation::dk_product, q, k, kDk, computed(2 * z.d * pairs, shared.dk));
}

/// The work before the tiles: D for fa2 and fa3, dQ = 0.
Work prepared(const Workload& w, const Sizes& z, std::int64_t rows) {
    const bool dots = w.schedule != Schedule::fa1;
    const std::int64_t read = dots ? rows * 2 * z.v : 0;
    const std::int64_t written = rows * (kSum * z.d + (dots ? kSum : 0));
    return {.bytes = {.dram = read + (w.residency.queries ? 0 : written), .l2 = read + written}};
}

/// The work after the tiles: dQ from fp32 to the dtype.
Work finished(const Workload& w, const Sizes& z, std::int64_t rows) {
    return {.bytes = {.dram = rows * (z.q + (w.residency.queries ? 0 : kSum * z.d)), .l2 = rows * (z.q + kSum * z.d)}};
}

/// The number of key tiles that share a read of non-resident data: those that run at once. fa1 runs one at a time.
std::int64_t sharing(const Workload& w) {
    if (w.residency.queries) return 0;
    return w.schedule == Schedule::fa1 ? 1 : std::max<std::int64_t>(w.residency.tiles_at_once, 1);
}

void run_kv_head(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    std::vector<FirstReads> queries(static_cast<std::size_t>(kv.group), FirstReads(sharing(w)));
    for (std::int64_t j = 0; j < kv.grid.columns(); ++j) {
        const Range k = kv.grid.keys(j);
        const Range touched = kv.grid.rows_of(j);
        out.at(kv.sequence, kv.first_query_head);
        if (!touched.empty()) {
            out.emit(Operation::load_k, {}, k, kNothing, moved(k.size() * z.q, true, k.size() * z.q));
            out.emit(Operation::load_v, {}, k, kNothing, moved(k.size() * z.v, true, k.size() * z.v));
        }
        for (std::int64_t h = 0; h < kv.group; ++h) {
            FirstReads& reads = queries[static_cast<std::size_t>(h)];
            out.at(kv.sequence, kv.first_query_head + h);
            reads.begin(j);
            for (std::int64_t i = touched.begin; i < touched.end; ++i) run_tile(out, kv.grid, i, j, reads.first(i));
        }
        out.at(kv.sequence, kv.first_query_head);
        out.emit(Operation::store_dkv, {}, k, kDk | kDv, moved(k.size() * (z.q + z.v), true));
    }
}

/// The queries of tiles that some column of a group reads for the first time. A group is all columns, or `at_once` of
/// them.
std::int64_t first_reads_of_queries(const Grid& grid, std::int64_t at_once) {
    const std::int64_t all = std::max<std::int64_t>(grid.columns(), 1);
    const std::int64_t step = at_once == 0 ? all : std::min(at_once, all);
    const Grid together{grid.band, {grid.block.block_q, grid.block.block_kv * step}};
    std::int64_t queries = 0;
    for_each_run_of_columns(together, [&](std::int64_t j, std::int64_t times) {
        queries += times * Grid::extent(together.rows_of(j), grid.block.block_q, grid.band.len_q);
    });
    return queries;
}

}  // namespace

void fa2_backward_steps(Emitter& out) {
    const Workload& w = out.workload();
    const auto for_each_row_of_all = [&](Operation operation, auto work) {
        for_each_kv_head(w, false, [&](const KvHead& kv) {
            for_each_row(out, kv, [&](std::int64_t, const Range& q) {
                out.emit(operation, q, {}, kDq, work(w, out.sizes(), q.size()));
            });
        });
    };
    for_each_row_of_all(Operation::row_dots, prepared);
    for_each_kv_head(w, false, [&](const KvHead& kv) { run_kv_head(out, kv); });
    for_each_row_of_all(Operation::store_dq, finished);
}

void fa1_backward_steps(Emitter& out) { fa2_backward_steps(out); }

Cost fa2_backward_cost(const Workload& w) {
    const Sizes z(w.problem);
    const RowBytes row(w, z);
    const bool far = !w.residency.queries;
    return sum_over_kv_heads(w, false, [&](const Grid& grid) {
        Cost head = tile_counts(grid);
        head.work = prepared(w, z, grid.band.len_q);
        head.work += finished(w, z, grid.band.len_q);
        head.work.flop = head.pairs * 2 * (3 * z.d + 2 * z.dv);
        head.work.exps = head.pairs;
        std::int64_t inner = 0;   // queries of all tiles: sum of t_j
        std::int64_t loaded = 0;  // keys of columns that run
        for_each_run_of_columns(grid, [&](std::int64_t j, std::int64_t times) {
            const std::int64_t keys = grid.keys(j).size();
            const Range touched = grid.rows_of(j);
            const std::int64_t rows = Grid::extent(touched, grid.block.block_q, grid.band.len_q);
            inner += times * rows;
            loaded += touched.empty() ? 0 : times * keys;
            // All terms are proportional to rows, except those that read the keys' rows once per tile of queries.
            SharedBytes shared(z, readers(w, grid.keys(j)), rows, 0);
            const std::int64_t per_tile = keys * (2 * z.q + z.v);
            const std::int64_t ds = rows * keys * z.e * (1 + readers(w, grid.keys(j)));
            head.work.bytes.shared += times * (shared.sum() + touched.size() * per_tile + ds + rows * (z.q + z.v));
        });
        head.work.bytes.l2 += inner * (row.q + row.gradients + row.dq);
        const std::int64_t first = first_reads_of_queries(grid, sharing(w));
        const std::int64_t near_gradients = w.schedule == Schedule::fa1 ? row.gradients : kSum;
        head.work.bytes.dram += first * (row.q + (far ? row.gradients + 2 * kSum * z.d : near_gradients));
        Cost total = w.problem.group() * head;
        total.work += moved(loaded * (z.q + z.v), true, loaded * (z.q + z.v));
        total.work += moved(grid.band.len_kv * (z.q + z.v), true);
        return total;
    });
}

Cost fa1_backward_cost(const Workload& w) { return fa2_backward_cost(w); }

}  // namespace tessera::schedule
