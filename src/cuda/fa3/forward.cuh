// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3 forward (Shah et al. 2024, Algorithm 1 and section 3): Q tiles outer, K/V blocks inner, as in
// FlashAttention-2; a producer warp fills shared memory by the copy engine; two or three consumer warpgroups multiply
// and exponentiate in turn, one while the other does the other (section 3.1); within one, the scores of a block are
// multiplied together with P V of the block before (section 3.2). The grid is persistent, and the blocks of all tiles
// of a thread block are one stream: a tile's first scores are multiplied beside the last P V of the tile before.
#pragma once

#include "cuda/fa3/epilogue.cuh"
#include "cuda/fa3/extras.cuh"
#include "cuda/fa3/producer.cuh"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/weights.cuh"
#include "cuda/fa3/work.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/shared/start.cuh"

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
    int thread;                        ///< 0 .. 127
    int never = min(launch.tiles, 0);  ///< 0, of which the compiler knows nothing: for weigh()

    QPosition q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    float s[kConfig.block_kv / 2];              ///< scores, then weights: [64 rows][block_kv] of the warpgroup
    std::uint32_t p[kConfig.block_kv / 16][4];  ///< weights in 16 bits
    float o[kConfig.head_dim_v / 2];            ///< [64 rows][head_dim_v]
    RowState<T> rows;
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
    /// Of the partial block whose V has come.
    __device__ __forceinline__ bool v_was_cleaned() const {
        bool met = false;
        for (int w = 0; w < kGuardWarps; ++w) met |= shared.v_dirty[v.stage()][w] != 0;
        return met;
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ int next_tile(TileReader& tiles);
    __device__ __forceinline__ void start_first_scores(const QPosition& position);
    __device__ __forceinline__ void finish_first_scores();
    __device__ __forceinline__ void multiply_blocks(const Tile& tile);
    __device__ __forceinline__ void finish_tile(const Tile& tile);
};

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    // With one Q stage, the next Q comes when O has left through this one: the first scores then wait for that.
    constexpr bool kAcross = kConfig.q_stages > 1;
    TileReader tiles{shared.tiles};
    int tile = next_tile(tiles);
    if (!tiles[tile].exists) return;
    start_first_scores(q);
    finish_first_scores();
    while (true) {
        multiply_blocks(tiles[tile]);
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
        finish_tile(tiles[tile]);
        tiles.close(tile, lane());
        if (!more) break;
        tile = next;
        if (!kAcross) {
            start_first_scores(q);
            finish_first_scores();
        }
    }
    output.finish(lane());
}

/// The next tile that sees keys, or the end; those on the way are written here.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::next_tile(TileReader& tiles) {
    while (true) {
        const int tile = tiles.open();
        if (!tiles[tile].exists || tiles[tile].has_keys()) return tile;
        store_empty_rows<T, kConfig>(launch.params, tiles[tile], row_in_tile(), lane());
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
__device__ __forceinline__ void Consumer<T, kConfig>::multiply_blocks(const Tile& tile) {
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
        // pairs, and those that raise a maximum.
        if (partial) hide(s, tile, row_in_tile(), n * kConfig.block_kv, lane());
        float rescale[2];
        rows.raise(s, tile, row_in_tile(), n * kConfig.block_kv, launch.scale_log2, launch.unscale, rescale);
        if (n != tile.n_end - 1) {
#pragma unroll
            for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= rescale[row_of(i)];
        }
        output.release(shared.q_ring, lane());
        bool care = false;
#pragma unroll 1
        while (!care) {
            std::uint64_t q_block, k_block, v_block;
            bool k_is_here, v_is_here;
            weigh(s, p, rows, launch.scale_log2, never, extra, n * kConfig.block_kv, [&] {
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
            if constexpr (kConfig.scores != Scores::general) care = rows.rises(s) | partial;
            ptx::wgmma_wait<0>();
            ptx::keep_in_place(o);
            ptx::keep_in_place(p);
            release_v();
            extra.transform(s, n * kConfig.block_kv);
            if constexpr (kConfig.scores == Scores::general) care = rows.rises(s) | partial;
        }
    }
}

/// O and LSE leave; the Q stage is given back when O is out of it.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(const Tile& tile) {
    const float inverse[2] = {rows.inverse_sum(0) * launch.params.keep_scale,
                              rows.inverse_sum(1) * launch.params.keep_scale};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= inverse[row_of(i)];
    if (dirty) restore_lost<T, kConfig>(o, launch.params, tile, row_in_tile(), lane());
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // nobody reads this Q any more
    store_lse(launch.params, tile, rows, row_in_tile(), lane());
    output.template store<T>(o, launch, tile, shared.q[q.stage()][warpgroup], q.stage(), row_in_tile(), lane());
    if constexpr (kConfig.q_stages == 1) output.release(shared.q_ring, lane());
    q.advance();
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    static_assert(kConfig.registers_fit());
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    if (threadIdx.x == 0) {
        for (const CUtensorMap* map : {&launch.q, &launch.k, &launch.v, &launch.o}) ptx::prefetch_tensor_map(*map);
        shared.init_barriers();
    }
    __syncthreads();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup == 0) {
        const int thread = static_cast<int>(threadIdx.x);
        ptx::give_registers<kConfig.producer_registers()>();
        if (thread == 0) Producer<kConfig>{launch, shared}.run();
        else if (thread >= 32) guard<T, kConfig>(shared, thread - 32);
    } else {
        ptx::take_registers<kConfig.consumer_registers()>();
        Consumer<T, kConfig>{launch, shared, warpgroup - 1}.run();
    }
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    return start(forward_kernel<T, Shape>, blocks, Shape::kConfig.threads(), kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3
