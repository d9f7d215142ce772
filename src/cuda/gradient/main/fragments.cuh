// SPDX-License-Identifier: Apache-2.0
//
// Functions of one thread on accumulators of mma.m16n8k16 whose rows are keys, float[4] of 16 keys x 8 columns:
// elements 0 and 1 belong to row lane / 4, elements 2 and 3 to the row 8 below.
#pragma once

#include "cuda/backward/fp16_scale.cuh"
#include "cuda/gradient/host/config.h"
#include "cuda/gradient/launch.hpp"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::gradient {

/// The thread's number, hidden from the compiler, which would keep values derived from it in registers over all steps.
/// It is unsigned, so that divisions by powers of two are shifts and masks alone.
__device__ __forceinline__ unsigned thread_number() {
    return static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
}
__device__ __forceinline__ int warp_number() { return static_cast<int>(thread_number() / 32); }
__device__ __forceinline__ int lane_number() { return static_cast<int>(thread_number() % 32); }

template <int kRows, int kColumns>
__device__ __forceinline__ void clear(float (&x)[kRows][kColumns][4]) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
        }
    }
}

template <int kRows, int kColumns>
__device__ __forceinline__ bool any_nonfinite(const float (&x)[kRows][kColumns][4]) {
    float probe = 0;  // x * 0 is NaN unless x is finite
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) probe = fmaf(x[m][n][e], 0.0F, probe);
        }
    }
    return probe != probe;
}

/// P = 2^kPScaleExponent exp2(factor * S - offset) in place. `offset` is that of the thread's two queries.
template <class T>
__device__ __forceinline__ void exponentiate(float (&s)[4], float factor, const float2& offset) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        s[e] = ptx::exp2_approx(fmaf(s[e], factor, kPScaleExponent<T> - (e % 2 == 0 ? offset.x : offset.y)));
    }
}

/// P in place, for a tile whose rows may have a large |LSE| (RowTile): their scores are rounded, as the maximum is,
/// before the maximum is subtracted. `column`: the thread's first query of the tile.
template <class T>
__device__ __forceinline__ void exponentiate_large(float (&s)[4], float scale, const RowTile& rows, int column) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int row = column + e % 2;
        if (rows.norm[row] == 0.0F) {
            s[e] = ptx::exp2_approx(fmaf(s[e], scale * kLog2E, kPScaleExponent<T> - rows.offset[row]));
        } else {
            const float below = __fadd_rn(__fmul_rn(s[e], scale), -rows.max[row]);
            s[e] = ptx::exp2_approx(fmaf(below, kLog2E, kPScaleExponent<T>)) * rows.norm[row];
        }
    }
}

/// Rounds four elements into a [keys][kBlockQ] tile.
template <class T>
__device__ __forceinline__ void store_rounded(char* tile, const float (&x)[4], int row, int chunk) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        char* to = tile + chunk_offset<kBlockQ>(row + 8 * r, chunk) + lane_number() % 4 * 4;
        *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(x[2 * r], x[2 * r + 1]);
    }
}

/// An element of a [keys][kBlockQ] tile.
template <class T>
__device__ __forceinline__ float element(const char* tile, int row, int column) {
    const char* at = tile + chunk_offset<kBlockQ>(row, column / kChunk) + column % kChunk * 2;
    return static_cast<float>(*reinterpret_cast<const T*>(at));
}
/// Two neighbours in a row of a [rows][kHeadDim] tile, from the even column `column` on.
template <class T, int kHeadDim>
__device__ __forceinline__ float2 two_elements(const char* tile, int row, int column) {
    const char* at = tile + chunk_offset<kHeadDim>(row, column / kChunk) + column % kChunk * 2;
    const auto packed = *reinterpret_cast<const std::uint32_t*>(at);
    return {ptx::unpack<T>(packed, 0), ptx::unpack<T>(packed, 1)};
}

/// Adds factor * x to two elements of row half r where x is Inf or NaN.
__device__ __forceinline__ void add_if_nonfinite(float (&sum)[4], int r, float factor, const float2& x) {
    if (!isfinite(x.x)) sum[2 * r] = fmaf(factor, x.x, sum[2 * r]);
    if (!isfinite(x.y)) sum[2 * r + 1] = fmaf(factor, x.y, sum[2 * r + 1]);
}

/// Writes two elements of row half r, times `factor`, to partial dK or dV, or adds them there. fmaf(x, f, 0) turns -0
/// into +0.
__device__ __forceinline__ void store_partial(float* to, const float (&sum)[4], int r, float factor, bool adds) {
    float2 x = {0, 0};
    if (adds) x = __ldcg(reinterpret_cast<const float2*>(to));
    x = {fmaf(sum[2 * r], factor, x.x), fmaf(sum[2 * r + 1], factor, x.y)};
    __stcg(reinterpret_cast<float2*>(to), x);
}

}  // namespace tessera::cuda::gradient
