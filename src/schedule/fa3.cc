// SPDX-License-Identifier: Apache-2.0
//
// fa3 forward (FlashAttention-3 paper, Algorithms 1 and 2): the tiles of fa2 in another order. A producer loads K_j and
// V_j ahead, and the GEMM of the next scores overlaps the softmax. S_j is issued before O += P_{j-1} V_{j-1}, so V
// trails K by one tile (section 3.2). The sums are those of fa2, except that wgmma reads Q from shared memory for every
// tile of keys. fa3 backward (section 3.4 and Appendix B.1) has the steps and bytes of fa2's.
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

struct RowWriter {
    Emitter& out;
    const Grid& grid;
    const Range& q;

    void load(Operation operation, const TilePosition& at, std::int64_t row_bytes) const {
        const std::int64_t bytes = at.loaded.size() * row_bytes;
        out.emit(operation, {}, at.loaded, kNothing, moved(bytes, at.first, bytes));
    }
    void scores(const TilePosition& at) const {
        const Sizes& z = out.sizes();
        load(Operation::load_k, at, z.q);
        const std::int64_t shared = readers(out.workload(), q) * at.computed.size() * z.q + q.size() * z.q;
        out.emit(Operation::scores, q, at.computed, kS, computed(2 * z.d * grid.pairs(at.i, at.j), shared),
                 grid.coverage(at.i, at.j));
    }
    void values(const TilePosition& at) const {
        const Sizes& z = out.sizes();
        load(Operation::load_v, at, z.v);
        const std::int64_t shared = readers(out.workload(), q) * at.computed.size() * z.v;
        out.emit(Operation::values, q, at.computed, kO, computed(2 * z.dv * grid.pairs(at.i, at.j), shared));
    }
    void softmax(const TilePosition& at) const {
        out.emit(Operation::softmax, q, at.computed, kM | kL | kP, computed(0, 0, grid.pairs(at.i, at.j)));
    }
};

void forward_steps(Emitter& out) {
    const Sizes& z = out.sizes();
    for_each_kv_head(out.workload(), true, [&](const KvHead& kv) {
        FirstReads reads = reads_of_keys(out.workload());
        for_each_row(out, kv, [&](std::int64_t i, const Range& q) {
            const RowWriter row{out, kv.grid, q};
            out.emit(Operation::load_q, q, {}, kM | kL | kO, moved(q.size() * z.q, true, q.size() * z.q));
            TilePosition before{};
            for_each_tile(kv.grid, i, reads, [&](const TilePosition& at) {
                row.scores(at);
                if (!before.computed.empty()) row.values(before);
                row.softmax(at);
                before = at;
            });
            if (!before.computed.empty()) row.values(before);
            out.emit(Operation::store_o, q, {}, kO | kL, moved(q.size() * (z.v + kSum), true, q.size() * z.v));
        });
    });
}

}  // namespace

Order fa3_order() {
    return {.forward_steps = forward_steps,
            .backward_steps = fa2_backward_steps,
            .forward_cost = fa2_forward_cost,
            .backward_cost = fa2_backward_cost,
            .forward_workspace = no_workspace,
            .backward_workspace = fa2_backward_workspace,
            .rows_per_reader = 64};  // a warpgroup: the rows of a wgmma
}

}  // namespace tessera::schedule
