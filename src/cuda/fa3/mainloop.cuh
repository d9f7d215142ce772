// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup: S = Q K^T, online softmax, O += P V over the blocks of keys of its tiles.
#pragma once

#include "cuda/fa3/epilogue.cuh"
#include "cuda/fa3/extras.cuh"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace tessera::cuda::fa3 {

/// The same value in all lanes, known to the compiler as such: the lower half of a descriptor, which holds the address,
/// then lives in a uniform register, and nothing stands between two products.
__device__ __forceinline__ std::uint64_t uniform(std::uint64_t descriptor) {
    const std::uint32_t low = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(descriptor), 0);
    return descriptor >> 32 << 32 | low;
}

/// S = Q K^T, started: [64][block_kv] of this warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void start_scores(float (&s)[kConfig.block_kv / 2], std::uint64_t q, std::uint64_t k) {
    constexpr int kQSlab = 64 * kSlabRowBytes >> 4;
    constexpr int kKSlab = kConfig.block_kv * kSlabRowBytes >> 4;
    ptx::keep_in_place(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kConfig.head_dim; column += 16) {
        const int slab = column / kSlabColumns;
        const int step = column % kSlabColumns / 16 * kStepColumns;
        ptx::wgmma_ss<kConfig.block_kv, T>(s, q + slab * kQSlab + step, k + slab * kKSlab + step, column > 0);
    }
    ptx::wgmma_commit();
}

/// O += P V, started: [64][head_dim_v] of this warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void start_output(float (&o)[kConfig.head_dim_v / 2],
                                             const std::uint32_t (&p)[kConfig.block_kv / 16][4], std::uint64_t v) {
    ptx::keep_in_place(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kConfig.block_kv / 16; ++step) {
        ptx::wgmma_rs<kConfig.head_dim_v, T>(o, p[step], v + step * kStepRows, true);
    }
    ptx::wgmma_commit();
}

/// One consumer warpgroup: 64 queries of each tile.
template <class T, Config kConfig>
struct Consumer {
    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;                             ///< 0 .. consumers - 1
    int never = min(launch.order.tiles(), 0);  ///< 0, of which the compiler knows nothing: for exponentiate()

    RingPosition<kConfig.q_stages> q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    /// Three consumers have no registers for what it takes.
    static constexpr bool kSettleUnderProducts = kConfig.consumers < 3;

    float s[kConfig.block_kv / 2];              ///< scores, then weights: [64 rows][block_kv] of the warpgroup
    std::uint32_t p[kConfig.block_kv / 16][4];  ///< weights in 16 bits
    float o[kConfig.head_dim_v / 2];            ///< [64 rows][head_dim_v]
    OnlineSoftmax<T> rows;
    bool partial;       ///< the block whose scores are in s had hidden pairs
    bool dirty;         ///< a NaN or infinity was taken out of some V of this tile
    bool lent = false;  ///< where O has no memory of its own: that of the tile before is still in what was lent for it

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The thread's first row; the producer's warps come before the consumers'.
    __device__ __forceinline__ static int row_in_tile() {
        return 16 * (static_cast<int>(threadIdx.x) / 32 - 4) + lane() / 4;
    }
    __device__ __forceinline__ std::uint64_t q_operand() const {
        return uniform(row_descriptor(shared.q[q.stage()][warpgroup]));
    }
    __device__ __forceinline__ std::uint64_t k_operand() const { return uniform(row_descriptor(shared.k[k.stage()])); }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return uniform(column_descriptor(shared.v[v.stage()], kConfig.block_kv));
    }
    __device__ __forceinline__ void release_k() {
        if (lane() == 0) k.release(shared.k_ring);
        k.advance();
    }
    __device__ __forceinline__ void release_v() {
        if (lane() == 0) v.release(shared.v_ring);
        v.advance();
    }
    /// Of the partial block whose V has come.
    __device__ __forceinline__ bool v_was_cleaned() const {
        bool met = false;
        for (int w = 0; w < kGuardWarps; ++w) met |= shared.v_dirty[v.stage()][w] != 0;
        return met;
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ const WorkTile& leave_ring(TileReader& tiles, int tile);
    __device__ __forceinline__ int next_tile(TileReader& tiles);
    __device__ __forceinline__ void start_first_scores(bool exist);
    __device__ __forceinline__ void multiply_blocks(const WorkTile& tile);
    __device__ __forceinline__ void start_last_output();
    __device__ __forceinline__ void finish_tile(const WorkTile& tile, bool more);
    __device__ __forceinline__ auto& borrow_output(bool more);
    __device__ __forceinline__ void return_output();
};

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    TileReader tiles{shared.tiles};
    int tile = next_tile(tiles);
    bool more = tiles[tile].exists;
    if (!more) return;
    start_first_scores(more);
    while (true) {
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(s);
        if (!more) break;
        release_k();
        multiply_blocks(tiles[tile]);
        // The last P V runs while the next tile is looked up, and the next tile's first scores while this one's O
        // leaves: where there is a second Q tile. Else Q is still on its way here, and comes while O leaves.
        constexpr bool kAcross = kConfig.q_stages > 1;
        start_last_output();
        const WorkTile& own = leave_ring(tiles, tile);
        tile = next_tile(tiles);
        more = tiles[tile].exists;
        if constexpr (kAcross) start_first_scores(more);
        rows.finish();
        ptx::wgmma_wait<kAcross ? 1 : 0>();
        ptx::keep_in_place(o);
        release_v();
        finish_tile(own, more);
        if constexpr (!kAcross) start_first_scores(more);
    }
    output.finish(lane());
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

/// S of the next tile's first block. Behind the last tile, of whatever lies there, and nobody reads it: a product that
/// is started on some paths only would have to be waited for at once.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_first_scores(bool exist) {
    if (exist) {
        q.wait_full(shared.q_ring);
        k.wait_full(shared.k_ring);
    }
    start_scores<T, kConfig>(s, q_operand(), k_operand());
}

/// All blocks of a tile, but for the P V of the last. The first one's scores are in s.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::multiply_blocks(const WorkTile& tile) {
    const int n_begin = tile.n_begin;
    const int full_begin = tile.full_begin;
    const int full_end = tile.full_end;
    int n = tile.n_end - 1;
    bool more = true;
    partial = n < full_begin || n >= full_end;
    dirty = false;
    const Extras<T, kConfig.scores> extra(launch, tile, row_in_tile(), lane());
    extra.transform(s, n * kConfig.block_kv);
    rows = {};
#pragma unroll
    for (float& element : o) element = 0;
#pragma unroll 1
    while (more) {
        // What wants care, and is out of the way of the loop inside: the first block of a tile, those with hidden
        // pairs, and those for which O is rescaled.
        if (partial) apply_mask(s, tile, row_in_tile(), n * kConfig.block_kv, lane());
        float rescale[2];
        rows.rescale(s, tile, row_in_tile(), n * kConfig.block_kv, launch.scale_log2, launch.unscale, rescale);
        if (!kSettleUnderProducts) rows.settle(launch.unscale);
        if (n != tile.n_end - 1) {
#pragma unroll
            for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= rescale[row_of(i)];
        } else if (lent) {
            return_output();
        }
        bool care = false;
#pragma unroll 1
        while (!care) {
            std::uint64_t q_block, k_block, v_block;
            bool k_is_here, v_is_here;
            exponentiate(s, p, rows, launch.scale_log2, never, extra, n * kConfig.block_kv, [&] {
                q_block = q_operand();
                k_block = k_operand();
                v_block = v_operand();
                k_is_here = k.is_full(shared.k_ring);
                v_is_here = v.is_full(shared.v_ring);
            });
            more = n > n_begin;
            if (!more) break;
            --n;
            if (!k_is_here) k.wait_full(shared.k_ring);
            if (!v_is_here) v.wait_full(shared.v_ring);
            if (partial) dirty |= v_was_cleaned();
            start_scores<T, kConfig>(s, q_block, k_block);
            start_output<T, kConfig>(o, p, v_block);
            if (kSettleUnderProducts && rows.unsettled) rows.settle(launch.unscale);
            ptx::wgmma_wait<1>();
            ptx::keep_in_place(s);
            release_k();
            partial = n < full_begin || n >= full_end;
            // While P V still runs. A cap only lowers the scores over 0 that are looked at here.
            if constexpr (kConfig.scores != Scores::general) care = rows.needs_rescale(s) | partial;
            ptx::wgmma_wait<0>();
            ptx::keep_in_place(o);
            ptx::keep_in_place(p);
            release_v();
            extra.transform(s, n * kConfig.block_kv);
            if constexpr (kConfig.scores == Scores::general) care = rows.needs_rescale(s) | partial;
        }
    }
    if (lane() == 0) q.release(shared.q_ring);  // all scores of the tile are done
    q.advance();
}

/// O += P V of a tile's last block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_last_output() {
    v.wait_full(shared.v_ring);
    if (partial) dirty |= v_was_cleaned();
    start_output<T, kConfig>(o, p, v_operand());
}

/// O and LSE leave. `more`: another tile comes.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(const WorkTile& tile, bool more) {
    const float inverse[2] = {rows.inverse_sum(0) * launch.params.keep_scale,
                              rows.inverse_sum(1) * launch.params.keep_scale};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= inverse[row_of(i)];
    if (dirty) restore_lost<T, kConfig>(o, launch.params, tile, row_in_tile(), lane());
    store_lse(launch.params, tile, rows, row_in_tile(), lane());
    output.template store<T>(o, launch, tile, borrow_output(more), row_in_tile(), lane());
    if (launch.o_rest.data != nullptr) store_rest<T>(o, launch, tile, row_in_tile(), lane());
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
            if (more) position.advance();  // past the K of the first scores, which are still multiplied
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
