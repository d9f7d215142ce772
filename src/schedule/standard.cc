// SPDX-License-Identifier: Apache-2.0
//
// Standard attention, forward (FlashAttention paper, section 2.2, Algorithm 0): S and P of all pairs go through slow
// memory. Per query head, with N^2 the elements of the tiles that the mask leaves:
//   S = Q K^T      reads Q once and K for every tile of queries; writes 4 N^2
//   P = softmax(S) reads 4 N^2, writes e N^2 (e: bytes of the Problem's dtype)
//   O = P V        reads e N^2 and V for every tile of queries; writes O and LSE
// The scores thus move N^2 (8 + 2 e) bytes: 12 per pair in 16 bits, 16 in fp32. With S in e bytes this is the paper's 4
// e.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

void make_scores(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    FirstReads reads = reads_of_keys(w);
    for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
        out.emit(Operation::load_q, q, {}, kNothing, moved(q.size() * z.q, true, q.size() * z.q));
        for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
            const std::int64_t bytes = at.loaded.size() * z.q;
            out.emit(Operation::load_k, {}, at.loaded, kNothing, moved(bytes, at.first, bytes));
            out.emit(Operation::scores, q, at.computed, kS,
                     computed(2 * z.d * kv.grid.pairs(i, at.j), readers(w, q) * at.computed.size() * z.q),
                     kv.grid.coverage(i, at.j));
            out.emit(Operation::store_scores, q, at.computed, kS, moved(at.elements() * kSum, !w.residency.scores));
        });
    });
}

void make_weights(Emitter& out, const KvHead& kv) {
    const bool far = !out.workload().residency.scores;
    for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
        const Range columns = kv.grid.columns_of(i);
        if (columns.empty()) return;
        const Range keys{columns.begin * kv.grid.block.block_kv, kv.grid.seen_by(i).end};
        const std::int64_t elements = q.size() * keys.size();
        std::int64_t pairs = 0;
        for (std::int64_t j = columns.begin; j < columns.end; ++j) pairs += kv.grid.pairs(i, j);
        out.emit(Operation::load_scores, q, keys, kNothing, moved(elements * kSum, far));
        out.emit(Operation::softmax, q, keys, kM | kL | kP, computed(0, 0, pairs));
        out.emit(Operation::store_weights, q, keys, kP, moved(elements * out.sizes().e, far));
    });
}

void multiply_values(Emitter& out, const KvHead& kv) {
    const Workload& w = out.workload();
    const Sizes& z = out.sizes();
    FirstReads reads = reads_of_keys(w);
    for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
        for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
            const std::int64_t bytes = at.loaded.size() * z.v;
            const std::int64_t weights = at.elements() * z.e;
            out.emit(Operation::load_v, {}, at.loaded, kNothing, moved(bytes, at.first, bytes));
            out.emit(Operation::load_weights, q, at.computed, kNothing, moved(weights, !w.residency.scores, weights));
            out.emit(Operation::values, q, at.computed, kO,
                     computed(2 * z.dv * kv.grid.pairs(i, at.j), readers(w, q) * at.computed.size() * z.v));
        });
        out.emit(Operation::store_o, q, {}, kO, moved(q.size() * (z.v + kSum), true));
    });
}

void forward_steps(Emitter& out) {
    const Workload& w = out.workload();
    for_each_kv_head(w, true, [&](const KvHead& kv) { make_scores(out, kv); });
    for_each_kv_head(w, true, [&](const KvHead& kv) { make_weights(out, kv); });
    for_each_kv_head(w, true, [&](const KvHead& kv) { multiply_values(out, kv); });
}

Cost forward_cost(const Workload& w) {
    const Sizes z(w.problem);
    return sum_over_kv_heads(w, true, [&](const Grid& grid) {
        Cost head = tile_counts(grid);
        const std::int64_t scores = head.elements * 2 * (kSum + z.e);
        const std::int64_t rows = grid.band.len_q * (z.q + z.v + kSum);
        head.work = {.bytes = {.dram = rows + (w.residency.scores ? 0 : scores),
                               .l2 = rows + scores,
                               .shared = grid.band.len_q * z.q + head.elements * z.e},
                     .flop = head.pairs * 2 * (z.d + z.dv),
                     .exps = head.pairs};
        for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t times) {
            const RowOfTiles row = row_of_tiles(w, grid, i);
            head.work.bytes.l2 += times * row.loaded * (z.q + z.v);
            head.work.bytes.shared += times * (row.loaded + row.readers * row.computed) * (z.q + z.v);
        });
        Cost total = w.problem.group() * head;
        total.work.bytes.dram += first_reads_of_keys(w, grid) * (z.q + z.v);
        return total;
    });
}

/// The bytes of `count` matrices of all scores in fp32.
std::int64_t matrices(const Workload& w, std::int64_t count) {
    std::int64_t bytes = 0;
    for (const auto& [lengths, times] : distinct_sequences(w))
        bytes += times * w.problem.heads_q * lengths.first * lengths.second * count * kSum;
    return bytes;
}

/// The workspace: S, overwritten by P.
std::int64_t forward_workspace(const Workload& w) { return matrices(w, 1); }

/// The workspace: P and dS, and D of every query.
std::int64_t backward_workspace(const Workload& w) {
    return matrices(w, 2) + w.problem.rows_q() * w.problem.heads_q * kSum;
}

}  // namespace

Order standard_order() {
    return {.forward_steps = forward_steps,
            .backward_steps = standard_backward_steps,
            .forward_cost = forward_cost,
            .backward_cost = standard_backward_cost,
            .forward_workspace = forward_workspace,
            .backward_workspace = backward_workspace};
}

}  // namespace tessera::schedule
