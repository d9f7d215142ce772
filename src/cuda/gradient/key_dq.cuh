// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/gradient/key_thread.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

/// dQ of a step: dS of all pairs of warps, by all warps.
template <class T, Config kConfig>
struct KeyDq : KeyThread<T, kConfig> {
    using Base = KeyThread<T, kConfig>;
    using Base::add_nonfinite;
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
    static constexpr int kAtOnce = std::min(Dq::kColumnTiles, kConfig.dq_columns);  // tiles of 8 columns
    using Part = float[Dq::kRowTiles][kAtOnce][4];                                  // [16 queries][8 dims][4]

    int tile = 0;    // of the step's
    int buffer = 0;  // its dS lies so many tiles further on

    static constexpr int kColumnParts = Dq::kColumnTiles / kAtOnce;
    static constexpr int kFours = Dq::kRowTiles * kAtOnce;  // numbers of a Part, in fours

    /// dQ of the tile of queries, by all warps, is added to what the blocks before have left in the workspace.
    __device__ __forceinline__ void add(const Step& step, int first_query, bool masked) const {
#pragma unroll 1
        for (int part = 0; part < kColumnParts; ++part) add_part(step, first_query, masked, part);
    }
    __device__ __forceinline__ void add_part(const Step& step, int first_query, bool masked, int part) const {
        Part dq;
        make(dq, first_query, masked, part);
        float* const to = place(inputs.launch.dq + (turns().place(step) + tile) * Dq::kFloats, part);
        const bool first = turns().first_to_add(step);
        if (first) {
#pragma unroll
            for (int i = 0; i < kFours; ++i) put_four<true>(to, dq, i);
        } else {
#pragma unroll
            for (int i = 0; i < kFours; ++i) put_four<false>(to, dq, i);
        }
    }

    /// Where a part is added, of this thread; `tile`: the tile's sum.
    __device__ static __forceinline__ float* place(float* tile, int part) {
        return tile + Dq::offset(0, part * kAtOnce, KeyInputs<T, kConfig>::thread());
    }
    /// Adds four numbers of kFours; the first block to add stores.
    template <bool kFirst>
    __device__ static __forceinline__ void put_four(float* to, const Part& dq, int i) {
        put<kFirst>(to + Dq::offset(i / kAtOnce, i % kAtOnce, 0), dq[i / kAtOnce][i % kAtOnce]);
    }
    template <bool kFirst>
    __device__ static __forceinline__ void put(float* place, const float (&x)[4]) {
        if constexpr (kFirst) __stcg(reinterpret_cast<float4*>(place), make_float4(x[0], x[1], x[2], x[3]));
        else ptx::red_add_v4(place, x);
    }

    /// dQ of the tile, a part of the warp's columns.
    __device__ __forceinline__ void make(Part& dq, int first_query, bool masked, int part) const {
        const int first_row = Dq::first_row(warp());
        const int first_chunk = Dq::first_chunk(warp()) + part * kAtOnce;
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
    }

 private:
    /// dQ = dS K, the warp's part.
    __device__ __forceinline__ void multiply_ds(Part& dq, int first_row, int first_chunk) const {
        const MatrixAddress<kBlockQ> ds(inputs.ds(tile + buffer), lane() / 16 * 8 + lane() % 8,
                                        first_row / kChunk + lane() / 8 % 2);
        const MatrixAddress<kHeadDim> k(inputs.k_tile(), lane() % 16, first_chunk + lane() / 16);
        clear(dq);
        multiply<T, kConfig.block_kv() / 16, Dq::kRowTiles, kAtOnce>(
            [&](int m) -> float(&)[kAtOnce][4] { return dq[m]; },
            [&](int step, int m, std::uint32_t(&a)[4]) { ptx::ldmatrix_x4_trans(a, ds.at(16 * step, 2 * m)); },
            [&](int step, int n, std::uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, k.at(16 * step, 2 * n)); },
            NothingBetween{});
    }

    /// Adds to dQ what Inf and NaN of K are to the queries that see the key.
    __device__ __forceinline__ void restore_keys(Part& dq, int first_query, int first_row, int first_chunk) const {
#pragma unroll 1
        for (int key = 0; key < kConfig.block_kv(); ++key) {
#pragma unroll
            for (int i = 0; i < 2 * Dq::kRowTiles; ++i) {
                const int row = first_row + 8 * i + lane() / 4;
                if (!sees(first_query + row, work.first_key + key)) continue;
                const float ds = element(inputs.ds(tile + buffer), key, row);
#pragma unroll
                for (int n = 0; n < kAtOnce; ++n) {
                    const int from = (first_chunk + n) * kChunk + lane() % 4 * 2;
                    add_nonfinite(dq[i / 2][n], i % 2, ds, elements(inputs.k_tile(), key, from));
                }
            }
        }
    }
};

}  // namespace tessera::cuda::gradient
