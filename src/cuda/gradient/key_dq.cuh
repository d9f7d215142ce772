// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/key_thread.cuh"

namespace tessera::cuda::gradient {

/// dQ of a step: dS of all pairs of warps, by all warps.
template <class T, Config kConfig>
struct KeyDq : KeyThread<T, kConfig> {
    using Base = KeyThread<T, kConfig>;
    using Base::add_special;
    using Base::clear;
    using Base::element;
    using Base::elements;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::lane;
    using Base::poisoned;
    using Base::sees;
    using Base::turns;
    using Base::warp;
    using Base::work;
    using Dq = DqTile<kHeadDim>;
    static constexpr int kAtOnce = Dq::kColumnTiles < 4 ? Dq::kColumnTiles : 4;  // tiles of 8 columns
    using Part = float[Dq::kRowTiles][kAtOnce][4];                               // [16 queries][8 dims][4]

    /// dQ of the tile of queries, by all warps, is added to what the blocks before have left in the workspace.
    __device__ __forceinline__ void add(const Step& step, int first_query, bool masked) const {
#pragma unroll 1
        for (int column = 0; column < Dq::kColumnTiles; column += kAtOnce) add_part(step, first_query, masked, column);
    }

 private:
    /// Columns of the warp from tile `column` on.
    __device__ __forceinline__ void add_part(const Step& step, int first_query, bool masked, int column) const {
        const int first_row = Dq::first_row(warp());
        const int first_chunk = Dq::first_chunk(warp()) + column;
        float* const to = inputs.launch.dq + turns().place(step) * Dq::kFloats;
        const bool first = turns().first_to_add(step);
        Part dq;
        multiply_ds(dq, first_row, first_chunk);
        // Hidden Inf and NaN of K are rare: only when some have come through is the product made again without them.
        if (masked && __syncthreads_or(poisoned(dq))) {
            clean<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(inputs.k_tile());
            __syncthreads();
            multiply_ds(dq, first_row, first_chunk);
            __syncthreads();
            inputs.load_k();
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            restore_keys(dq, first_query, first_row, first_chunk);
        }
        if (!first) {
#pragma unroll
            for (int m = 0; m < Dq::kRowTiles; ++m) {
                float4 old[kAtOnce];
#pragma unroll
                for (int n = 0; n < kAtOnce; ++n) old[n] = __ldcg(at(to, m, column + n));
#pragma unroll
                for (int n = 0; n < kAtOnce; ++n) {
                    float(&x)[4] = dq[m][n];
                    x[0] += old[n].x, x[1] += old[n].y, x[2] += old[n].z, x[3] += old[n].w;
                }
            }
        }
#pragma unroll
        for (int m = 0; m < Dq::kRowTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const float(&x)[4] = dq[m][n];
                __stcg(at(to, m, column + n), make_float4(x[0], x[1], x[2], x[3]));
            }
        }
    }

    __device__ static __forceinline__ float4* at(float* tile, int m, int n) {
        return reinterpret_cast<float4*>(tile + Dq::offset(m, n, static_cast<int>(threadIdx.x)));
    }

    /// dQ = dS K, the warp's part.
    __device__ __forceinline__ void multiply_ds(Part& dq, int first_row, int first_chunk) const {
        const MatrixAddress<kBlockQ> ds(inputs.ds(), lane() / 16 * 8 + lane() % 8, first_row / kChunk + lane() / 8 % 2);
        const MatrixAddress<kHeadDim> k(inputs.k_tile(), lane() % 16, first_chunk + lane() / 16);
        clear(dq);
#pragma unroll
        for (int key = 0; key < kConfig.block_kv(); key += 16) {
            std::uint32_t a[Dq::kRowTiles][4];
#pragma unroll
            for (int m = 0; m < Dq::kRowTiles; ++m) ptx::ldmatrix_x4_trans(a[m], ds.at(key, 2 * m));
#pragma unroll
            for (int n = 0; n < kAtOnce; n += 2) {
                std::uint32_t b[4];
                ptx::ldmatrix_x4_trans(b, k.at(key, n));
#pragma unroll
                for (int m = 0; m < Dq::kRowTiles; ++m) {
                    ptx::mma<T>(dq[m][n], a[m], b[0], b[1]);
                    ptx::mma<T>(dq[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    /// Adds to dQ what Inf and NaN of K are to the queries that see the key.
    __device__ __forceinline__ void restore_keys(Part& dq, int first_query, int first_row, int first_chunk) const {
#pragma unroll 1
        for (int key = 0; key < kConfig.block_kv(); ++key) {
#pragma unroll
            for (int i = 0; i < 2 * Dq::kRowTiles; ++i) {
                const int row = first_row + 8 * i + lane() / 4;
                if (!sees(first_query + row, work.first_key + key)) continue;
                const float ds = element(inputs.ds(), key, row);
#pragma unroll
                for (int n = 0; n < kAtOnce; ++n) {
                    const int from = (first_chunk + n) * kChunk + lane() % 4 * 2;
                    add_special(dq[i / 2][n], i % 2, ds, elements(inputs.k_tile(), key, from));
                }
            }
        }
    }
};

}  // namespace tessera::cuda::gradient
