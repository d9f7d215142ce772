// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/gradient/main/cta_tiles.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

/// dQ = dS K of one tile of kBlockQ queries by all warps, and its addition to an accumulator in the workspace.
template <class T, Config kConfig>
struct DqGemm {
    static constexpr int kHeadDim = kConfig.head_dim;
    using Dq = DqTile<kHeadDim>;
    static constexpr int kAtOnce = std::min(Dq::kColumnTiles, kConfig.dq_columns);  // tiles of 8 columns
    static constexpr int kColumnParts = Dq::kColumnTiles / kAtOnce;
    using Part = float[Dq::kRowTiles][kAtOnce][4];          // [16 queries][8 dims][4]
    static constexpr int kFours = Dq::kRowTiles * kAtOnce;  // float4s of a Part

    const CtaTiles<T, kConfig> tiles;
    int tile = 0;    // index among the step's query tiles
    int buffer = 0;  // offset, in tiles, of the dS buffer that is read

    /// Computes dQ and adds it to the sum of the earlier key blocks in the workspace.
    __device__ __forceinline__ void add(const Step& step, int first_query, bool masked) const {
#pragma unroll 1
        for (int part = 0; part < kColumnParts; ++part) add_part(step, first_query, masked, part);
    }

    /// The thread's first float4 of a part of the columns in the tile's `accumulator`.
    __device__ static __forceinline__ float* destination(float* accumulator, int part) {
        return accumulator + Dq::offset(0, part * kAtOnce, CtaTiles<T, kConfig>::thread());
    }
    /// Adds float4 `i` of kFours. kFirst: no key block has added before.
    template <bool kFirst>
    __device__ static __forceinline__ void add_four(float* to, const Part& dq, int i) {
        add_four<kFirst>(to + Dq::offset(i / kAtOnce, i % kAtOnce, 0), dq[i / kAtOnce][i % kAtOnce]);
    }
    template <bool kFirst>
    __device__ static __forceinline__ void add_four(float* to, const float (&x)[4]) {
        if constexpr (kFirst) __stcg(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
        else ptx::red_add_v4(to, x);
    }

    /// dQ of the tile, a part of the warp's columns.
    __device__ __forceinline__ void multiply(Part& dq, int first_query, bool masked, int part) const {
        const int first_row = Dq::first_row(warp_number());
        const int first_chunk = Dq::first_chunk(warp_number()) + part * kAtOnce;
        multiply_ds(dq, first_row, first_chunk);
        // Inf and NaN in hidden keys are rare. Only if they reached dQ is the GEMM repeated without them.
        if (masked && __syncthreads_or(any_nonfinite(dq))) {
            clean<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(tiles.k_tile());
            __syncthreads();
            multiply_ds(dq, first_row, first_chunk);
            __syncthreads();
            tiles.load_k();
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            add_nonfinite_keys(dq, first_query, first_row, first_chunk);
        }
    }

 private:
    __device__ __forceinline__ void add_part(const Step& step, int first_query, bool masked, int part) const {
        Part dq;
        multiply(dq, first_query, masked, part);
        const DqSemaphore semaphore = tiles.dq_semaphore();
        float* const to = destination(tiles.launch.dq + (semaphore.index(step) + tile) * Dq::kFloats, part);
        const bool first = semaphore.is_first(step);
        if (first) {
#pragma unroll
            for (int i = 0; i < kFours; ++i) add_four<true>(to, dq, i);
        } else {
#pragma unroll
            for (int i = 0; i < kFours; ++i) add_four<false>(to, dq, i);
        }
    }

    __device__ __forceinline__ void multiply_ds(Part& dq, int first_row, int first_chunk) const {
        const MatrixAddress<kBlockQ> ds(tiles.ds_tile(tile + buffer), lane_number() / 16 * 8 + lane_number() % 8,
                                        first_row / kChunk + lane_number() / 8 % 2);
        const MatrixAddress<kHeadDim> k(tiles.k_tile(), lane_number() % 16, first_chunk + lane_number() / 16);
        clear(dq);
        cuda::multiply<T, kConfig.block_kv() / 16, Dq::kRowTiles, kAtOnce>(
            [&](int m) -> float(&)[kAtOnce][4] { return dq[m]; },
            [&](int step, int m, std::uint32_t(&a)[4]) { ptx::ldmatrix_x4_trans(a, ds.at(16 * step, 2 * m)); },
            [&](int step, int n, std::uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, k.at(16 * step, 2 * n)); },
            NothingBetween{});
    }

    /// Adds the products of Inf and NaN in K to the queries that see the key.
    __device__ __forceinline__ void add_nonfinite_keys(Part& dq, int first_query, int first_row,
                                                       int first_chunk) const {
#pragma unroll 1
        for (int key = 0; key < kConfig.block_kv(); ++key) {
#pragma unroll
            for (int i = 0; i < 2 * Dq::kRowTiles; ++i) {
                const int row = first_row + 8 * i + lane_number() / 4;
                if (!tiles.sees(first_query + row, tiles.work.first_key + key)) continue;
                const float ds = element<T>(tiles.ds_tile(tile + buffer), key, row);
#pragma unroll
                for (int n = 0; n < kAtOnce; ++n) {
                    const int column = (first_chunk + n) * kChunk + lane_number() % 4 * 2;
                    add_if_nonfinite(dq[i / 2][n], i % 2, ds, two_elements<T, kHeadDim>(tiles.k_tile(), key, column));
                }
            }
        }
    }
};

}  // namespace tessera::cuda::gradient
