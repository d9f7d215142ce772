// SPDX-License-Identifier: Apache-2.0
//
// fa1 forward (FlashAttention paper, section 3.1, Algorithm 1): tiles of keys outer, tiles of queries inner. O, m and l
// of every query lie in slow memory, and each tile of keys reads and writes them. Per query head, with T_c tiles of
// keys and t_j the queries of the tiles that tile j touches:
//   K, V once:      e N_k (d + d_v)
//   inner loop:     sum over j of t_j (e d + 2 (4 d_v + 8))       Q read; O, m, l read and written back
//   beginning, end: N_q (4 d_v + 8) written; N_q (4 d_v + 8) read, N_q (e d_v + 4) written
// Without a mask t_j = N_q, so the inner loop is T_c N_q (e d + 8 d_v + 16). With O in e bytes this is the paper's T_c
// 3 e N d, and with B_c = M / (4 d) its Theorem 2, Theta(N^2 d^2 / M). Here O is fp32, as in both kernels. Resident
// `queries` means that Q and the state of a head stay in the L2 from one tile of keys to the next.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

void run_column(Emitter& out, const KvHead& kv, std::int64_t j, bool keys_first, FirstReads& queries) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    const Range touched = kv.grid.rows_of(j);
    if (touched.empty()) return;
    const Range k = kv.grid.keys(j);
    const bool far = !w.residency.queries;
    out.emit(Operation::load_k, {}, k, kNothing, moved(k.size() * z.q, keys_first, k.size() * z.q));
    out.emit(Operation::load_v, {}, k, kNothing, moved(k.size() * z.v, keys_first, k.size() * z.v));
    for (std::int64_t i = touched.begin; i < touched.end; ++i) {
        const Range q = kv.grid.queries(i);
        const Range run = kv.grid.computed(i, j);
        const std::int64_t pairs = kv.grid.pairs(i, j);
        const std::int64_t read = readers(w, q) * run.size();
        const bool first = queries.first(i) || far;
        out.emit(Operation::load_q, q, {}, kNothing, moved(q.size() * z.q, first, q.size() * z.q));
        out.emit(Operation::load_state, q, {}, kNothing, moved(q.size() * z.state(), far));
        out.emit(Operation::scores, q, run, kS, computed(2 * z.d * pairs, read * z.q), kv.grid.coverage(i, j));
        out.emit(Operation::softmax, q, run, kM | kL | kP, computed(0, 0, pairs));
        out.emit(Operation::values, q, run, kO, computed(2 * z.dv * pairs, read * z.v));
        out.emit(Operation::store_state, q, {}, kM | kL | kO, moved(q.size() * z.state(), far));
    }
}

void forward_steps(Emitter& out) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    const bool far = !w.residency.queries;
    for_each_kv_head(w, true, [&](const KvHead& kv) {
        for (std::int64_t h = 0; h < kv.group; ++h) {
            out.at(kv.sequence, kv.first_query_head + h);
            for (std::int64_t i = 0; i < kv.grid.rows(); ++i) {
                const Range q = kv.grid.queries(i);
                out.emit(Operation::init_state, q, {}, kM | kL | kO, moved(q.size() * z.state(), far));
            }
            FirstReads queries(0);
            for (std::int64_t j = 0; j < kv.grid.columns(); ++j)
                run_column(out, kv, j, h == 0 || !w.residency.keys, queries);
            for (std::int64_t i = 0; i < kv.grid.rows(); ++i) {
                const Range q = kv.grid.queries(i);
                out.emit(Operation::load_state, q, {}, kNothing, moved(q.size() * z.state(), far));
                out.emit(Operation::store_o, q, {}, kO, moved(q.size() * (z.v + kSum), true));
            }
        }
    });
}

Cost forward_cost(const Workload& w) {
    const Sizes z(w.problem);
    const bool far = !w.residency.queries;
    return sum_over_kv_heads(w, true, [&](const Grid& grid) {
        Cost head = tile_counts(grid);
        const std::int64_t len_q = grid.band.len_q;
        std::int64_t inner = 0;   // queries of all tiles that run: sum of t_j
        std::int64_t seeing = 0;  // queries in tiles that run at all
        std::int64_t read = 0;    // keys, once for each reader
        for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t times) {
            const RowOfTiles row = row_of_tiles(w, grid, i);
            inner += times * row.tiles * row.rows;
            seeing += row.tiles > 0 ? times * row.rows : 0;
            read += times * row.readers * row.computed;
        });
        const Range seen = grid.band.kv_range(0, len_q);
        const std::int64_t size = grid.block.block_kv;
        const std::int64_t keys =
            seen.empty() ? 0 : Grid::extent({seen.begin / size, ceil_div(seen.end, size)}, size, grid.band.len_kv);
        const std::int64_t state = 2 * (inner + len_q) * z.state();
        const std::int64_t leaving = len_q * (z.v + kSum);
        head.work = {.bytes = {.dram = leaving + (far ? inner * z.q + state : seeing * z.q),
                               .l2 = leaving + inner * z.q + state + keys * (z.q + z.v),
                               .shared = inner * z.q + (keys + read) * (z.q + z.v)},
                     .flop = head.pairs * 2 * (z.d + z.dv),
                     .exps = head.pairs};
        Cost total = w.problem.group() * head;
        total.work.bytes.dram += (w.residency.keys ? 1 : w.problem.group()) * keys * (z.q + z.v);
        return total;
    });
}

/// The workspace: O, m and l.
std::int64_t forward_workspace(const Workload& w) {
    return w.problem.rows_q() * w.problem.heads_q * Sizes(w.problem).state();
}

/// The workspace: dQ in fp32.
std::int64_t backward_workspace(const Workload& w) {
    return w.problem.rows_q() * w.problem.heads_q * kSum * w.problem.head_dim;
}

}  // namespace

Order fa1_order() {
    return {.forward_steps = forward_steps,
            .backward_steps = fa1_backward_steps,
            .forward_cost = forward_cost,
            .backward_cost = fa1_backward_cost,
            .forward_workspace = forward_workspace,
            .backward_workspace = backward_workspace};
}

}  // namespace tessera::schedule
