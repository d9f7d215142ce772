// SPDX-License-Identifier: Apache-2.0
//
// The layout of the workspace (launch.hpp), as kernels address it.
#pragma once

#include "cuda/gradient/launch.hpp"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

/// The first tile of queries of a sequence's head.
__device__ __forceinline__ std::int64_t first_tile(const Launch& launch, const Sequence& sequence, std::int64_t batch,
                                                   int head) {
    const bool ragged = launch.params.forward.cu_seqlens_q != nullptr;
    const std::int64_t before = ragged ? sequence.first_q / kBlockQ + batch : batch * launch.q_tiles;
    return head * launch.tiles_of_head + before;
}

/// Some queries of a head: number `tile` of the tiles of a size.
struct HeadTile {
    std::int64_t batch;
    int head;
    int tile;  ///< ragged: may be none of the sequence
};

/// Tiles of `block_q` queries of a head, over all sequences of a ragged call, or of one sequence.
__host__ __device__ __forceinline__ std::int64_t tiles_of_head(const ForwardParams& p, int block_q) {
    return p.cu_seqlens_q != nullptr ? p.total_q / block_q + p.batch : (p.len_q + block_q - 1) / block_q;
}
/// Tiles of all heads.
__host__ __device__ __forceinline__ std::int64_t tiles_of_heads(const ForwardParams& p, int block_q) {
    return p.heads_q * tiles_of_head(p, block_q) * (p.cu_seqlens_q != nullptr ? 1 : p.batch);
}
/// The tile of a number in [0, tiles_of_heads()): those of a head follow each other, in reverse with kReversed.
template <bool kReversed = false>
__device__ __forceinline__ HeadTile head_tile_at(const ForwardParams& p, unsigned number, int block_q) {
    const auto tiles = static_cast<unsigned>(tiles_of_head(p, block_q));
    const unsigned pair = number / tiles;
    const auto index = static_cast<int>(kReversed ? tiles - 1 - number % tiles : number % tiles);
    if (p.cu_seqlens_q == nullptr) {
        return {pair / static_cast<unsigned>(p.heads_q), static_cast<int>(pair % static_cast<unsigned>(p.heads_q)),
                index};
    }
    const QueryTile of = ragged_tile(p, index, block_q);
    return {of.batch, static_cast<int>(pair), of.block};
}

/// The fp16 scale of dS of a head (before/fp16_scale.cuh); 1 in other formats.
template <class T>
__device__ __forceinline__ float ds_scale(const Launch& launch, std::int64_t batch, int head) {
    if constexpr (!std::is_same_v<T, __half>) return 1;
    return launch.ds_scales[batch * launch.params.forward.heads_q + head];
}

/// The layout of a dQ accumulator, fp32 [kBlockQ][kHeadDim] in the order of the threads that hold it: float4 number i
/// of thread t lies at [i][t], so that a warp reads and writes neighbouring 16 bytes. The float4s are accumulators of
/// mma.m16n8k16; eight warps are two halves of the queries times four quarters of the columns.
template <int kHeadDim>
struct DqTile {
    static constexpr int kThreads = 256;
    static constexpr int kRowTiles = kBlockQ / 2 / 16;
    static constexpr int kColumnTiles = kHeadDim / 4 / 8;
    static constexpr std::int64_t kFloats = std::int64_t{kBlockQ} * kHeadDim;

    __device__ static __forceinline__ int first_row(int warp) { return warp / 4 * (kBlockQ / 2); }
    __device__ static __forceinline__ int first_chunk(int warp) { return warp % 4 * kColumnTiles; }
    __device__ static __forceinline__ std::int64_t offset(int m, int n, int thread) {
        return (std::int64_t{m * kColumnTiles + n} * kThreads + thread) * 4;
    }
};

}  // namespace tessera::cuda::gradient
