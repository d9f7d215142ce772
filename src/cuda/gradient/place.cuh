// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/launch.hpp"
#include "cuda/tile/score.cuh"

namespace tessera::cuda::gradient {

/// The first tile of queries of a sequence's head in the workspace.
__device__ __forceinline__ std::int64_t first_tile(const Launch& launch, const Sequence& sequence, std::int64_t batch,
                                                   int head) {
    const bool ragged = launch.params.forward.cu_seqlens_q != nullptr;
    const std::int64_t before = ragged ? sequence.first_q / kBlockQ + batch : batch * launch.q_tiles;
    return head * launch.tiles_of_head + before;
}

/// The tiles of queries that a block of keys meets, and the order: from the diagonal to the end, then from the first to
/// the diagonal. All three numbers grow with the block's number, so that the blocks that meet a tile in one of the two
/// sweeps are neighbours; they add to dQ in falling order.
struct Meeting {
    int begin = 0;
    int end = 0;
    int diagonal = 0;  // in [begin, end]

    Meeting() = default;
    /// In tiles of `block_q` queries, a power of two.
    __device__ Meeting(const Band& band, int block, int block_kv, int block_q) {
        const std::int64_t first_key = std::int64_t{block} * block_kv;
        if (first_key >= band.len_kv) return;
        const Range queries = band.q_range(first_key, min(first_key + block_kv, band.len_kv));
        if (queries.empty()) return;
        const int bits = __ffs(block_q) - 1;  // divisions would take thousands of clocks of a block's first thread
        begin = static_cast<int>(queries.begin >> bits);
        end = static_cast<int>((queries.end + block_q - 1) >> bits);
        diagonal = min(max(static_cast<int>(first_key >> bits), begin), end);
    }

    __device__ __forceinline__ int count() const { return end - begin; }
    /// Of the tile that comes at this place of the order.
    __device__ __forceinline__ int sweep(int place) const { return place < end - diagonal ? 0 : 1; }
    __device__ __forceinline__ int tile(int place) const {
        return sweep(place) == 0 ? diagonal + place : begin + place - (end - diagonal);
    }
    __device__ __forceinline__ bool meets(int in_sweep, int tile) const {
        return in_sweep == 0 ? tile >= diagonal && tile < end : tile >= begin && tile < diagonal;
    }
};

/// A power of two that dS of a head is held times, in 16 bits: fp16 has neither large numbers nor small ones
/// (units.cuh).
template <class T>
__device__ __forceinline__ float gradient_unit(const Launch& launch, std::int64_t batch, int head) {
    if constexpr (!std::is_same_v<T, __half>) return 1;
    return launch.limits[batch * launch.params.forward.heads_q + head];
}

/// dQ of a tile of queries in the workspace, in fp32: float4 number i of thread t lies at [i][t], so that threads read
/// and write neighbouring 16 bytes. What a thread holds are accumulators of mma.m16n8k16; eight warps are two halves of
/// the queries times four quarters of the columns.
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
