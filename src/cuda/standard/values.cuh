// SPDX-License-Identifier: Apache-2.0
//
// The third kernel: O = P V / l. A CTA owns a query tile; tiles of P and V are copied some steps ahead of their GEMM.
// The backward computes dQ = dS K with it.
#pragma once

#include "cuda/shared/start.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::standard {

/// Shared memory of a CTA, a P and a V tile for each stage, and the copies into it.
template <class T, Config kConfig>
struct ValueTiles {
    static constexpr int kStages = kConfig.value_stages();
    const BlockRange tiles;
    const Source v;
    const Head& head;
    std::int64_t pitch;
    int q_begin;
    char* shared;

    __device__ __forceinline__ char* p_tile(int tile) const {
        return shared + (tile - tiles.begin) % kStages * (kConfig.p_bytes() + kConfig.kv_bytes());
    }
    __device__ __forceinline__ char* v_tile(int tile) const { return p_tile(tile) + kConfig.p_bytes(); }

    /// Starts the copies of a tile as one group. A group past the end is empty, so that the number in flight is known.
    __device__ __forceinline__ void load_tile(int tile) const {
        if (tile < tiles.end) {
            const int key = tile * kConfig.block_kv();
            const Source p{.data = reinterpret_cast<const char*>(head.scores) + key * std::int64_t{sizeof(T)},
                           .row_bytes = pitch * std::int64_t{sizeof(float)},
                           .column_bytes = sizeof(T),
                           .rows = head.sequence.len_q,
                           .dim = kConfig.block_kv(),
                           .vector = true};
            load<kConfig.block_q(), kConfig.block_kv(), kConfig.threads()>(p_tile(tile), p, q_begin);
            load<kConfig.block_kv(), kConfig.head_dim, kConfig.threads()>(v_tile(tile), v, key);
        }
        ptx::cp_async_commit();
    }
};

/// Writes a warp's rows of O times their factors, through shared memory. `nonfinite`: the factor with which Inf and NaN
/// of V that were replaced by 0 are added.
template <class T, Config kConfig>
__device__ __forceinline__ void write_o(const Launch& launch, const ValueTiles<T, kConfig>& inputs, bool replaced,
                                        const float (&o)[kConfig.row_tiles][kConfig.head_dim / 8][4], int first_row,
                                        int lane, float nonfinite) {
    const Head& head = inputs.head;
    float factor[kConfig.row_tiles][2];
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = inputs.q_begin + first_row + 16 * m + 8 * r + lane / 4;
            factor[m][r] = row < head.sequence.len_q ? head.factors[row] : 0.0F;
        }
    }
    stage<T, kConfig.head_dim>(inputs.shared, o, factor, first_row, lane);
    __syncwarp();
    const ForwardParams& p = launch.params;
    const std::int64_t offset = head_offset(p.o, head.batch, head.sequence.first_q, head.head, sizeof(T));
    const Target target = target_of<T>(p.o, offset, head.sequence.len_q, p.head_dim_v, launch.vector_o);
    constexpr int kRows = kConfig.rows_per_warp();
    if (replaced) {
        restore<T, kConfig.head_dim, kRows>(inputs.shared, inputs.v, Band32(head.band), inputs.q_begin, first_row, lane,
                                            nonfinite);
    }
    store<kConfig.head_dim, kRows>(inputs.shared, target, inputs.q_begin, first_row, lane);
}

/// O = P V of a query tile.
template <class T, Config kConfig>
__device__ __forceinline__ void multiply_values(const Launch& launch, char* memory, float nonfinite) {
    constexpr int kHeadDim = kConfig.head_dim;
    const ForwardParams& p = launch.params;
    const Head head(launch, blockIdx.x / launch.q_blocks);
    const int q_begin = static_cast<int>(blockIdx.x % launch.q_blocks) * kConfig.block_q();
    if (q_begin >= head.sequence.len_q) return;
    const std::int64_t offset = head_offset(p.v, head.batch, head.sequence.first_kv, head.head / p.group, sizeof(T));
    const ValueTiles<T, kConfig> inputs{
        .tiles = head.tiles(q_begin),
        .v = source_of<T>(p.v, offset, head.sequence.len_kv, p.head_dim_v, launch.vector_v),
        .head = head,
        .pitch = launch.pitch,
        .q_begin = q_begin,
        .shared = memory};
    const BlockRange& tiles = inputs.tiles;
#pragma unroll
    for (int i = 0; i + 1 < kConfig.value_stages(); ++i) inputs.load_tile(tiles.begin + i);

    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = static_cast<int>(threadIdx.x) / 32 * kConfig.rows_per_warp();
    float o[kConfig.row_tiles][kHeadDim / 8][4] = {};  // [16 rows][8 dims][4]
    bool replaced = false;                             // Inf or NaN in V were replaced by 0
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        ptx::cp_async_wait<kConfig.value_stages() - 2>();
        __syncthreads();  // the tile has arrived for all threads, and all have read the previous one
        inputs.load_tile(tile + kConfig.value_stages() - 1);
        char* v_tile = inputs.v_tile(tile);
        if (!tiles.full(tile)) {
            replaced |= __syncthreads_or(clean<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(v_tile)) != 0;
        }
        multiply_stored_pv<T>(o, MatrixAddress<kConfig.block_kv()>::rows_first(inputs.p_tile(tile), first_row, lane),
                              MatrixAddress<kHeadDim>::rows_first(v_tile, 0, lane));
    }
    __syncthreads();  // O is staged over the tiles of other warps
    write_o(launch, inputs, replaced, o, first_row, lane, nonfinite);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    values_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) char memory[];
    multiply_values<T, Shape::kConfig>(launch, memory, 1);
}

/// dQ = dS K. Inf or NaN in a key makes dQ NaN for the queries that see it, whatever the sign: it may have made P 0,
/// and 0 times Inf or NaN is NaN.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    dq_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) char memory[];
    multiply_values<T, Shape::kConfig>(launch, memory, NAN);
}

template <class T, class Shape>
cudaError_t start_values(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    static_assert(kConfig.value_shared_bytes() >= kConfig.q_bytes(), "O is staged in the tiles");
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.q_blocks;
    return start(values_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.value_shared_bytes(), launch, stream);
}

template <class T, class Shape>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.q_blocks;
    return start(dq_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.value_shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::standard
