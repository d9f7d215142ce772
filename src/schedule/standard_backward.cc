// SPDX-License-Identifier: Apache-2.0
//
// Standard attention, backward (FlashAttention paper, Algorithm 3), as in the CPU kernel: P and dS of all pairs go
// through slow memory. Per query head, N^2 elements in the tiles that the mask leaves:
//   P, dS   from Q, K, V, dO, LSE, D for every tile; writes 4 N^2 each
//   dQ      reads dS, and K for every tile of queries
//   dV, dK  read P and dS, and Q and dO for every tile of keys
// This makes 20 N^2 bytes. The paper keeps P of the forward and writes dP before dS: 7 passes of e N^2.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

void make_weights_and_ds(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    const bool far = !w.residency.scores;
    FirstReads reads = reads_of_keys(w);
    for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
        out.emit(Operation::row_dots, q, {}, kNothing, moved(q.size() * 2 * z.v, true));
        out.emit(Operation::load_q, q, {}, kNothing, moved(q.size() * z.q, true, q.size() * z.q));
        out.emit(Operation::load_gradients, q, {}, kNothing, moved(q.size() * kSum, true, q.size() * z.v));
        for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
            const std::int64_t pairs = kv.grid.pairs(i, at.j);
            const std::int64_t read = readers(w, q) * at.computed.size();
            const std::int64_t matrix = at.elements() * kSum;
            out.emit(Operation::load_k, {}, at.loaded, kNothing,
                     moved(at.loaded.size() * z.q, at.first, at.loaded.size() * z.q));
            out.emit(Operation::load_v, {}, at.loaded, kNothing,
                     moved(at.loaded.size() * z.v, at.first, at.loaded.size() * z.v));
            out.emit(Operation::scores, q, at.computed, kS, computed(2 * z.d * pairs, read * z.q),
                     kv.grid.coverage(i, at.j));
            out.emit(Operation::weights_again, q, at.computed, kP, computed(0, 0, pairs));
            out.emit(Operation::dp_product, q, at.computed, kS, computed(2 * z.dv * pairs, read * z.v));
            out.emit(Operation::store_weights, q, at.computed, kP, moved(matrix, far));
            out.emit(Operation::store_ds, q, at.computed, kS, moved(matrix, far));
        });
    });
}

void multiply_keys(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    FirstReads reads = reads_of_keys(w);
    for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
        for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
            const std::int64_t bytes = at.loaded.size() * z.q;
            out.emit(Operation::load_k, {}, at.loaded, kNothing, moved(bytes, at.first, bytes));
            out.emit(Operation::load_ds, q, at.computed, kNothing, moved(at.elements() * kSum, !w.residency.scores));
            out.emit(Operation::dq_product, q, at.computed, kDq,
                     computed(2 * z.d * kv.grid.pairs(i, at.j), readers(w, q) * at.computed.size() * z.q));
        });
        out.emit(Operation::store_dq, q, {}, kDq, moved(q.size() * z.q, true));
    });
}

void multiply_queries(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    const bool far = !w.residency.scores;
    for (std::int64_t j = 0; j < kv.grid.columns(); ++j) {
        const Range k = kv.grid.keys(j);
        const Range rows = kv.grid.rows_of(j);
        for (std::int64_t h = 0; h < kv.group; ++h) {
            out.at(kv.sequence, kv.first_query_head + h);
            for (std::int64_t i = rows.begin; i < rows.end; ++i) {
                const Range q = kv.grid.queries(i);
                const Range run = kv.grid.computed(i, j);
                const std::int64_t matrix = q.size() * run.size() * kSum;
                const std::int64_t pairs = kv.grid.pairs(i, j);
                const std::int64_t read = readers(w, run) * q.size();
                // The first loop has read both; they stay in the L2 if `queries` are resident.
                out.emit(Operation::load_q, q, {}, kNothing, moved(q.size() * z.q, !w.residency.queries));
                out.emit(Operation::load_gradients, q, {}, kNothing, moved(q.size() * z.v, !w.residency.queries));
                out.emit(Operation::load_weights, q, run, kNothing, moved(matrix, far));
                out.emit(Operation::load_ds, q, run, kNothing, moved(matrix, far));
                out.emit(Operation::dv_product, q, run, kDv, computed(2 * z.dv * pairs, read * z.v));
                out.emit(Operation::dk_product, q, run, kDk, computed(2 * z.d * pairs, read * z.q));
            }
        }
        out.emit(Operation::store_dkv, {}, k, kDk | kDv, moved(k.size() * (z.q + z.v), true));
    }
}

}  // namespace

void standard_backward_steps(Emitter& out) {
    const Workload& w = out.workload();
    for_each_kv_head(w, true, [&](const KvHead& kv) { make_weights_and_ds(out, kv); });
    for_each_kv_head(w, true, [&](const KvHead& kv) { multiply_keys(out, kv); });
    for_each_kv_head(w, true, [&](const KvHead& kv) { multiply_queries(out, kv); });
}

Cost standard_backward_cost(const Workload& w) {
    const Sizes z(w.problem);
    return sum_over_kv_heads(w, true, [&](const Grid& grid) {
        Cost head = tile_counts(grid);
        const std::int64_t rows = grid.band.len_q * (2 * z.v + z.q + kSum + z.q);  // O, dO, Q, LSE in; dQ out
        const std::int64_t matrices = head.elements * 5 * kSum;
        head.work = {.bytes = {.dram = rows + (w.residency.scores ? 0 : matrices),
                               .l2 = rows + matrices,
                               .shared = grid.band.len_q * (z.q + z.v)},
                     .flop = head.pairs * 2 * (3 * z.d + 2 * z.dv),
                     .exps = head.pairs};
        for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t times) {
            const RowOfTiles row = row_of_tiles(w, grid, i);
            const std::int64_t gradients = times * row.tiles * row.rows * (z.q + z.v);
            head.work.bytes.l2 += times * row.loaded * (2 * z.q + z.v) + gradients;
            if (!w.residency.queries) head.work.bytes.dram += gradients;
            head.work.bytes.shared +=
                times * ((row.loaded + row.readers * row.computed + row.key_readers * row.rows) * (z.q + z.v) +
                         (row.loaded + row.readers * row.computed) * z.q);
        });
        Cost total = w.problem.group() * head;
        total.work.bytes.dram += first_reads_of_keys(w, grid) * (2 * z.q + z.v);
        total.work += moved(grid.band.len_kv * (z.q + z.v), true);
        return total;
    });
}

}  // namespace tessera::schedule
