// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward (FlashAttention-2 paper, Algorithm 1): tiles of queries outer, tiles of keys inner. O, m and l stay in
// fast memory until they are done. Per query head, with T_r tiles of B_r queries and W_i the keys of the tiles that
// tile i touches:
//   l2    = e N_q (d + d_v) + 4 N_q + sum over i of e W_i (d + d_v)   Q, O, LSE once; K, V for every tile of queries
//   dram  = e N_q (d + d_v) + 4 N_q + K, V once for the group         if K, V of a head stay in the L2
// Without a mask W_i = N_k, so K and V are read T_r times; causal, W_i is about B_c ceil(i B_r / B_c), half of that.
// This is the paper's Theta(N^2 d^2 / M) with B_r = Theta(M / d), but the L2 carries it.
//
// Shared memory: every loaded tile is written once. Each reader (a warp or warpgroup with its queries) reads K and V
// once, and O leaves through it.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

void forward_steps(Emitter& out) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    for_each_kv_head(w, true, [&](const KvHead& kv) {
        FirstReads reads = reads_of_keys(w);
        for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
            out.emit(Operation::load_q, q, {}, kM | kL | kO, moved(q.size() * z.q, true, q.size() * z.q));
            for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
                const std::int64_t pairs = kv.grid.pairs(i, at.j);
                const std::int64_t read = readers(w, q) * at.computed.size();
                const std::int64_t k_bytes = at.loaded.size() * z.q;
                const std::int64_t v_bytes = at.loaded.size() * z.v;
                out.emit(Operation::load_k, {}, at.loaded, kNothing, moved(k_bytes, at.first, k_bytes));
                out.emit(Operation::load_v, {}, at.loaded, kNothing, moved(v_bytes, at.first, v_bytes));
                out.emit(Operation::scores, q, at.computed, kS, computed(2 * z.d * pairs, read * z.q),
                         kv.grid.coverage(i, at.j));
                out.emit(Operation::softmax, q, at.computed, kM | kL | kP, computed(0, 0, pairs));
                out.emit(Operation::values, q, at.computed, kO, computed(2 * z.dv * pairs, read * z.v));
            });
            out.emit(Operation::store_o, q, {}, kO | kL, moved(q.size() * (z.v + kSum), true, q.size() * z.v));
        });
    });
}

}  // namespace

Cost fa2_forward_cost(const Workload& w) {
    const Sizes z(w.problem);
    const bool q_is_read_from_shared = w.schedule == Schedule::fa3;
    return sum_over_kv_heads(w, true, [&](const Grid& grid) {
        Cost head = tile_counts(grid);
        const std::int64_t rows = grid.band.len_q * (z.q + z.v + kSum);
        head.work = {.bytes = {.dram = rows, .l2 = rows, .shared = grid.band.len_q * (z.q + z.v)},
                     .flop = head.pairs * 2 * (z.d + z.dv),
                     .exps = head.pairs};
        for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t times) {
            const RowOfTiles row = row_of_tiles(w, grid, i);
            head.work.bytes.l2 += times * row.loaded * (z.q + z.v);
            head.work.bytes.shared += times * (row.loaded + row.readers * row.computed) * (z.q + z.v);
            if (q_is_read_from_shared) head.work.bytes.shared += times * row.tiles * row.rows * z.q;
        });
        Cost total = w.problem.group() * head;
        total.work.bytes.dram += first_reads_of_keys(w, grid) * (z.q + z.v);
        return total;
    });
}

std::int64_t fa2_backward_workspace(const Workload& w) {
    return w.problem.rows_q() * w.problem.heads_q * (kSum * w.problem.head_dim + kSum);
}

Order fa2_order() {
    return {.forward_steps = forward_steps,
            .backward_steps = fa2_backward_steps,
            .forward_cost = fa2_forward_cost,
            .backward_cost = fa2_backward_cost,
            .forward_workspace = no_workspace,
            .backward_workspace = fa2_backward_workspace};
}

}  // namespace tessera::schedule
