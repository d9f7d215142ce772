// SPDX-License-Identifier: Apache-2.0
//
// The first kernel: S = scale * Q K^T with softcap, ALiBi, bias and mask, to memory in fp32. A CTA owns a query tile;
// the next K tile is copied while the GEMM of this one runs. Tiles that the mask empties are skipped. The backward
// takes Q K^T and dO V^T without the rest (gemm_kernel).
#pragma once

#include "cuda/shared/start.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::standard {

/// Writes a warp's part of a tile of S. s: [16 rows][8 keys][4]; `row`, `key`: of the thread's first element.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void write_scores(const Head& head, std::int64_t pitch,
                                             const float (&s)[kRowTiles][kTiles][4], int row, int key) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = row + 16 * m + 8 * r;
            if (query >= head.sequence.len_q) continue;
            float* to = head.scores + query * pitch + key;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                *reinterpret_cast<float2*>(to + 8 * n) = make_float2(s[m][n][2 * r], s[m][n][2 * r + 1]);
            }
        }
    }
}

/// Q K^T of a query tile and all key tiles that it sees. kTransforms: with scale, softcap, ALiBi, bias and mask.
template <class T, Config kConfig, bool kTransforms>
__device__ __forceinline__ void multiply_tiles(const Launch& launch, char* memory) {
    constexpr int kHeadDim = kConfig.head_dim;
    const ForwardParams& p = launch.params;
    const Head head(launch, blockIdx.x / launch.q_blocks);
    const Sequence& sequence = head.sequence;
    const int q_begin = static_cast<int>(blockIdx.x % launch.q_blocks) * kConfig.block_q();
    if (q_begin >= sequence.len_q) return;
    const BlockRange tiles = head.tiles(q_begin);
    if (tiles.begin >= tiles.end) return;

    const std::int64_t k_offset = head_offset(p.k, head.batch, sequence.first_kv, head.head / p.group, sizeof(T));
    const std::int64_t q_offset = head_offset(p.q, head.batch, sequence.first_q, head.head, sizeof(T));
    const Source q = source_of<T>(p.q, q_offset, sequence.len_q, p.head_dim, launch.vector_q);
    const Source k = source_of<T>(p.k, k_offset, sequence.len_kv, p.head_dim, launch.vector_k);
    const auto k_tile = [&](int tile) { return memory + kConfig.q_bytes() + tile % 2 * kConfig.kv_bytes(); };
    const auto load_k = [&](int tile) {
        load<kConfig.block_kv(), kHeadDim, kConfig.threads()>(k_tile(tile), k, tile * kConfig.block_kv());
        ptx::cp_async_commit();
    };
    load<kConfig.block_q(), kHeadDim, kConfig.threads()>(memory, q, q_begin);
    load_k(tiles.begin);

    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = static_cast<int>(threadIdx.x) / 32 * kConfig.rows_per_warp();
    const int row = q_begin + first_row + lane / 4;
    const Band32 band(head.band);
    const HeadScores<T> transforms(p, sequence, head.batch, head.head);
    Queries<kHeadDim, kConfig.row_tiles, false> queries(memory, first_row, lane);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived for all threads, and all have read the previous one
        if (tile + 1 < tiles.end) load_k(tile + 1);
        float s[kConfig.row_tiles][kConfig.block_kv() / 8][4];  // [16 rows][8 keys][4]
        multiply_qk<T>(s, queries, MatrixAddress<kHeadDim>::chunks_first(k_tile(tile), lane));
        const int key = tile * kConfig.block_kv() + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) {
            if constexpr (!kTransforms) break;
            if (tiles.full(tile)) transforms.template transform<false>(s[m], band, row + 16 * m, key);
            else transforms.template transform<true>(s[m], band, row + 16 * m, key);
        }
        write_scores(head, launch.pitch, s, row, key);
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    scores_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) char memory[];
    multiply_tiles<T, Shape::kConfig, true>(launch, memory);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    gemm_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) char memory[];
    multiply_tiles<T, Shape::kConfig, false>(launch, memory);
}

template <class T, class Shape>
cudaError_t start_scores(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.q_blocks;
    return start(scores_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.score_shared_bytes(), launch, stream);
}

template <class T, class Shape>
cudaError_t start_gemm(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.q_blocks;
    return start(gemm_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.score_shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::standard
