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
    using QPosition = RingPosition<kConfig.q_stages>;

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;                     ///< 0 .. consumers - 1
    int never = min(launch.tiles, 0);  ///< 0, of which the compiler knows nothing: for exponentiate()

    QPosition q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    float s[kConfig.block_kv / 2];              ///< scores, then weights: [64 rows][block_kv] of the warpgroup
    std::uint32_t p[kConfig.block_kv / 16][4];  ///< weights in 16 bits
    float o[kConfig.head_dim_v / 2];            ///< [64 rows][head_dim_v]
    OnlineSoftmax<T> rows;
    bool partial;  ///< the block whose scores are in s had hidden pairs
    bool dirty;    ///< a NaN or infinity was taken out of some V of this tile

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The thread's first row; the producer's warps come before the consumers'.
    __device__ __forceinline__ static int row_in_tile() {
        return 16 * (static_cast<int>(threadIdx.x) / 32 - 4) + lane() / 4;
    }
    __device__ __forceinline__ std::uint64_t q_operand(const QPosition& position) const {
        return uniform(row_descriptor(shared.q[position.stage()][warpgroup]));
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
    /// Where O of this warpgroup is laid down.
    __device__ __forceinline__ auto& output_slabs() const {
        if constexpr (kConfig.own_o()) return shared.o[warpgroup];
        else return shared.q[q.stage()][warpgroup];
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
    __device__ __forceinline__ void start_first_scores(const QPosition& position);
    __device__ __forceinline__ void finish_first_scores();
    __device__ __forceinline__ void multiply_blocks(const WorkTile& tile);
    __device__ __forceinline__ void finish_tile(const WorkTile& tile);
};

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    // With one Q stage, the next Q comes when O has left through this one: the first scores then wait for that.
    constexpr bool kAcross = kConfig.own_o();
    TileReader tiles{shared.tiles};
    int tile = next_tile(tiles);
    if (!tiles[tile].exists) return;
    start_first_scores(q);
    finish_first_scores();
    while (true) {
        multiply_blocks(tiles[tile]);
        const WorkTile& own = leave_ring(tiles, tile);
        const int next = next_tile(tiles);
        const bool more = tiles[next].exists;
        if (kAcross && more) {
            QPosition next_q = q;
            next_q.advance();
            start_first_scores(next_q);
        }
        v.wait_full(shared.v_ring);
        if (partial) dirty |= v_was_cleaned();
        start_output<T, kConfig>(o, p, v_operand());
        rows.finish();
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(s);
        ptx::keep_in_place(o);
        if (kAcross && more) release_k();
        release_v();
        finish_tile(own);
        if (!more) break;
        tile = next;
        if (!kAcross) {
            start_first_scores(q);
            finish_first_scores();
        }
    }
    output.finish(lane());
}

/// This warp's own copy of a tile, whose place in the ring is given back: its last V comes when the producer meets the
/// next tile with keys, and any number of tiles without keys may come before that and want places.
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

/// S of a tile's first block, whose Q is at `position`.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_first_scores(const QPosition& position) {
    position.wait_full(shared.q_ring);
    k.wait_full(shared.k_ring);
    start_scores<T, kConfig>(s, q_operand(position), k_operand());
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_first_scores() {
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(s);
    release_k();
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
        if (n != tile.n_end - 1) {
#pragma unroll
            for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= rescale[row_of(i)];
        }
        bool care = false;
#pragma unroll 1
        while (!care) {
            std::uint64_t q_block, k_block, v_block;
            bool k_is_here, v_is_here;
            exponentiate(s, p, rows, launch.scale_log2, never, extra, n * kConfig.block_kv, [&] {
                q_block = q_operand(q);
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
    if (kConfig.own_o() && lane() == 0) q.release(shared.q_ring);  // all scores of the tile are done
}

/// O and LSE leave. Where O goes through Q's memory, that is given back when O is out of it.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(const WorkTile& tile) {
    const float inverse[2] = {rows.inverse_sum(0) * launch.params.keep_scale,
                              rows.inverse_sum(1) * launch.params.keep_scale};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= inverse[row_of(i)];
    if (dirty) restore_lost<T, kConfig>(o, launch.params, tile, row_in_tile(), lane());
    if constexpr (kConfig.own_o()) output.wait(lane());
    else ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // nobody reads this Q any more
    store_lse(launch.params, tile, rows, row_in_tile(), lane());
    output.template store<T>(o, launch, tile, output_slabs(), row_in_tile(), lane());
    if (launch.o_rest.data != nullptr) store_rest<T>(o, launch, tile, row_in_tile(), lane());
    if constexpr (!kConfig.own_o()) {
        output.wait(lane());
        if (lane() == 0) q.release(shared.q_ring);
    }
    q.advance();
}

}  // namespace tessera::cuda::fa3
