// SPDX-License-Identifier: Apache-2.0
//
// A consumer warpgroup: what it holds, where its products find their operands, and how a tile begins and ends. The main
// loop has a page of its own (mainloop.cuh).
#pragma once

#include "cuda/fa3/epilogue.cuh"
#include "cuda/fa3/extras.cuh"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
#include "cuda/tile/products.cuh"

namespace tessera::cuda::fa3 {

/// The blocks of keys of a tile, from the last to the first.
struct KeyBlocks {
    int begin, full_begin, full_end;
    int n;         ///< the block whose scores are in S
    bool partial;  ///< it holds pairs that are not visible

    __device__ __forceinline__ explicit KeyBlocks(const WorkTile& tile)
        : begin(tile.n_begin), full_begin(tile.full_begin), full_end(tile.full_end), n(tile.n_end - 1) {
        partial = n < full_begin || n >= full_end;
    }
    __device__ __forceinline__ bool at_last() const { return n <= begin; }
    __device__ __forceinline__ void advance() {
        --n;
        partial = n < full_begin || n >= full_end;
    }
};

/// One consumer warpgroup: 64 queries of each tile.
template <class T, Config kConfig>
struct Consumer {
    using Extra = Extras<T, kConfig.block_kv, kConfig.scores>;

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;                                ///< 0 .. consumers - 1
    ptx::IssueOrder order{launch.order.tiles()};  ///< of the exponentials

    RingPosition<kConfig.q_stages> q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    Products<T, kConfig.block_kv, kConfig.head_dim, kConfig.head_dim_v> products;
    OnlineSoftmax<T> rows;
    bool dirty;         ///< a NaN or infinity was taken out of some V of this tile
    bool lent = false;  ///< where O has no memory of its own: that of the tile before is still in what was lent for it

    /// The last P V of a tile runs under the first scores of the next, where there is a second Q tile for them. Else Q
    /// is still on its way here, and comes while O leaves.
    static constexpr bool kAcrossTiles = kConfig.q_stages > 1;
    /// Three consumers have no registers for what it takes.
    static constexpr bool kSettleUnderProducts = kConfig.consumers < 3;

    // The main loop.
    __device__ __forceinline__ void run();
    __device__ __forceinline__ bool multiply_blocks(const WorkTile& tile);
    __device__ __forceinline__ void mask_and_rescale(const WorkTile& tile, const KeyBlocks& blocks);
    __device__ __forceinline__ bool multiply_until_care(KeyBlocks& blocks, Extra& extra);

    // The ends of a tile.
    __device__ __forceinline__ int next_tile(TileReader& tiles);
    __device__ __forceinline__ const WorkTile& leave_ring(TileReader& tiles, int tile);
    __device__ __forceinline__ void start_first_scores(bool exist);
    __device__ __forceinline__ void start_last_output(bool partial);
    __device__ __forceinline__ void finish_tile(const WorkTile& tile, bool more);
    __device__ __forceinline__ auto& borrow_output(bool more);
    __device__ __forceinline__ void return_output();

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The thread's first row; the producer's warps come before the consumers'.
    __device__ __forceinline__ static int row_in_tile() {
        return 16 * (static_cast<int>(threadIdx.x) / 32 - 4) + lane() / 4;
    }

    /// What the products of a step multiply, and whether it has come yet.
    struct Operands {
        std::uint64_t q, k, v;
        bool k_is_here, v_is_here;
    };
    __device__ __forceinline__ std::uint64_t q_operand() const {
        return uniform(row_descriptor(shared.q[q.stage()][warpgroup]));
    }
    __device__ __forceinline__ std::uint64_t k_operand() const { return uniform(row_descriptor(shared.k[k.stage()])); }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return uniform(column_descriptor(shared.v[v.stage()], kConfig.block_kv));
    }
    __device__ __forceinline__ Operands look_up_operands() const {
        Operands next;
        next.q = q_operand();
        next.k = k_operand();
        next.v = v_operand();
        next.k_is_here = k.is_full(shared.k_ring);
        next.v_is_here = v.is_full(shared.v_ring);
        return next;
    }
    /// `partial`: so was the block of this V, and the guard has looked at it.
    __device__ __forceinline__ void wait_for(const Operands& next, bool partial) {
        if (!next.k_is_here) k.wait_full(shared.k_ring);
        if (!next.v_is_here) v.wait_full(shared.v_ring);
        if (partial) dirty |= v_was_cleaned();
    }
    __device__ __forceinline__ bool v_was_cleaned() const {
        bool met = false;
        for (int w = 0; w < kGuardWarps; ++w) met |= shared.v_dirty[v.stage()][w] != 0;
        return met;
    }

    __device__ __forceinline__ void release_q() {
        if (lane() == 0) q.release(shared.q_ring);
        q.advance();
    }
    __device__ __forceinline__ void release_k() {
        if (lane() == 0) k.release(shared.k_ring);
        k.advance();
    }
    __device__ __forceinline__ void release_v() {
        if (lane() == 0) v.release(shared.v_ring);
        v.advance();
    }
};

/// The next tile that sees keys, or the end; those on the way are written here.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::next_tile(TileReader& tiles) {
    while (true) {
        const int tile = tiles.open();
        if (!tiles[tile].exists || tiles[tile].has_keys()) return tile;
        store_empty_rows<T, kConfig>(launch, tiles[tile], row_in_tile(), lane());
        tiles.close(tile, lane());
    }
}

/// This warp's own copy of a tile, whose place in the ring is given back: any number of tiles without keys may come
/// before the next one with keys and want places, and what is lent for O comes with that one.
template <class T, Config kConfig>
__device__ __forceinline__ const WorkTile& Consumer<T, kConfig>::leave_ring(TileReader& tiles, int tile) {
    WorkTile& own = shared.finishing[static_cast<int>(threadIdx.x) / 32 - 4];
    if (lane() == 0) own = tiles[tile];
    tiles.close(tile, lane());
    return own;
}

/// S of the next tile's first block. Behind the last tile, of whatever lies there, and nobody reads it: a product that
/// is started on some paths only would have to be waited for at once.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_first_scores(bool exist) {
    if (exist) {
        q.wait_full(shared.q_ring);
        k.wait_full(shared.k_ring);
    }
    products.start_scores(q_operand(), k_operand());
}

/// O += P V of a tile's last block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_last_output(bool partial) {
    v.wait_full(shared.v_ring);
    if (partial) dirty |= v_was_cleaned();
    products.start_output(v_operand());
}

/// O and LSE leave. `more`: another tile comes.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(const WorkTile& tile, bool more) {
    const float inverse[2] = {rows.inverse_sum(0) * launch.params.keep_scale,
                              rows.inverse_sum(1) * launch.params.keep_scale};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) products.o[i] *= inverse[row_of(i)];
    const ThreadRows own(tile, launch.stack, row_in_tile());
    if (dirty) restore_lost<T, kConfig>(products.o, launch.params, tile, own, lane());
    store_lse(launch.params, tile, rows, own, lane());
    output.template store<T>(products.o, launch, tile, borrow_output(more), row_in_tile(), lane());
    if (launch.o_rest.data != nullptr) store_rest<T>(products.o, launch, tile, row_in_tile(), lane());
}

/// Where O of this warpgroup is laid down: its own memory, or a stage that the producer lends (Producer::lend_stages),
/// of V to the first warpgroup and of K to the second.
template <class T, Config kConfig>
__device__ __forceinline__ auto& Consumer<T, kConfig>::borrow_output(bool more) {
    if constexpr (kConfig.own_o()) {
        output.wait(lane());
        return shared.o[warpgroup];
    } else {
        using Slabs = Slab64[kConfig.v_slabs()];
        lent = true;
        void* stage;
        if (warpgroup == 0) {
            v.wait_full(shared.v_ring);
            stage = shared.v[v.stage()];
        } else {
            auto position = k;
            if (more) position.advance();  // past the K of the first scores, which are still to be multiplied
            position.wait_full(shared.k_ring);
            stage = shared.k[position.stage()];
        }
        return *static_cast<Slabs*>(stage);
    }
}

/// Both stages go back to the producer. Not before the next tile's first softmax, so that O is out of them by then.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::return_output() {
    lent = false;
    output.wait(lane());
    k.wait_full(shared.k_ring);
    release_k();
    v.wait_full(shared.v_ring);
    release_v();
}

}  // namespace tessera::cuda::fa3
