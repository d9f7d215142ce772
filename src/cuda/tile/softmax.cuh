// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on accumulators of mma.m16n8k16: a thread holds parts of two rows (r = 0, 1: 8 rows apart), a quad of
// threads holds whole rows. s[kTiles][4]: element e of tile j is row e / 2, column 8 * j + e % 2.
#pragma once

#include <cmath>

#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/exponent_offset.cuh"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda {

/// The positive factors of Q K^T: S = natural * Q K^T, and the same in units of log2.
struct Scale {
    float natural = 1;
    float log2 = kLog2E;
};

/// How a block of scores changes two rows.
struct Rescaling {
    float before[2];   // the previous maxima
    float rescale[2];  // factors of O and l
    float factor[2];   // P = exp2(fma(score, factor, -offset))
    float offset[2];

    __device__ __forceinline__ bool any() const { return rescale[0] != 1.0F || rescale[1] != 1.0F; }
    __device__ __forceinline__ bool large(int r) const { return !(fabsf(offset[r]) < kLargeScore); }
    __device__ __forceinline__ bool any_large() const { return large(0) || large(1); }
};

/// Running maximum m (of unscaled scores) and sum l of two rows. A block of scores goes through update_max(), which
/// finds the new m, exponentiate(), which turns scores into P, and add(); update() does all three. A row's values
/// depend on that row alone: not on its neighbours in the warp, nor on blocks of which it sees no key.
template <class T>
struct alignas(16) OnlineSoftmax {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};  // l times 2^-kExponentOffset, the thread's part until finish()

    /// The maxima after this block.
    template <int kTiles>
    __device__ __forceinline__ float2 maxima(const float (&s)[kTiles][4]) const {
        float found[2] = {max[0], max[1]};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) found[e / 2] = fmaxf(found[e / 2], s[j][e]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) found[r] = quad_max(found[r]);
        return {found[0], found[1]};
    }

    __device__ __forceinline__ Rescaling update_max(const float2& maxima, const Scale& scale) {
        Rescaling rescaling;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rescaling.before[r] = max[r];
            max[r] = r == 0 ? maxima.x : maxima.y;
            rescaling.factor[r] = scale.log2;
            rescaling.offset[r] = offset(max[r], scale);
            rescaling.rescale[r] =
                ptx::exp2_approx(fmaf(rescaling.before[r], scale.log2, kExponentOffset<T>) - rescaling.offset[r]);
        }
        return rescaling;
    }

    /// For rows whose maximum is large: subtracts it from the scores, after rounding both.
    template <int kTiles>
    __device__ __forceinline__ void subtract(float (&s)[kTiles][4], const Scale& scale, Rescaling& rescaling) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!rescaling.large(r)) continue;
            const float m = __fmul_rn(max[r], scale.natural);
            rescaling.rescale[r] = ptx::exp2_approx((__fmul_rn(rescaling.before[r], scale.natural) - m) * kLog2E);
            rescaling.factor[r] = kLog2E;
            rescaling.offset[r] = kExponentOffset<T>;
#pragma unroll
            for (int i = 0; i < 2 * kTiles; ++i) {
                float& score = s[i / 2][2 * r + i % 2];
                score = __fadd_rn(__fmul_rn(score, scale.natural), -m);
            }
        }
    }

    /// Scores of 8 columns become P = 2^-kExponentOffset * exp(score - m), and are added to `part`.
    __device__ static __forceinline__ void exponentiate(float (&s)[4], const Rescaling& rescaling, float (&part)[2]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[e] = ptx::exp2_approx(fmaf(s[e], rescaling.factor[e / 2], -rescaling.offset[e / 2]));
            part[e / 2] += s[e];
        }
    }

    /// Rescales l to the new maxima. Here and in add(), explicit rounding keeps the compiler from fusing in one copy of
    /// the code and not in another: a row's bits would then depend on its position in the tile.
    __device__ __forceinline__ void rescale(const Rescaling& rescaling) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fmul_rn(sum[r], rescaling.rescale[r]);
    }

    /// Adds the sums of a block, one number a row, so that rounding errors stay small over long rows.
    __device__ __forceinline__ void add(const float (&part)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(sum[r], part[r]);
    }

    /// update_max(), exponentiate() and add() in one. `rescale`: the factor of O.
    template <int kTiles>
    __device__ __forceinline__ void update(float (&s)[kTiles][4], const Scale& scale, float (&rescale)[2]) {
        Rescaling rescaling = update_max(maxima(s), scale);
        if (any_lane(rescaling.any_large())) subtract(s, scale, rescaling);
        this->rescale(rescaling);
        float part[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) exponentiate(s[j], rescaling, part);
        add(part);
        rescale[0] = rescaling.rescale[0];
        rescale[1] = rescaling.rescale[1];
    }

    /// Sums over the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
    }

    /// After finish(): the natural logarithm of the sum of exponentials; -inf for a row without keys.
    __device__ __forceinline__ float lse(int r, const Scale& scale) const {
        const float l = sum[r] * kExponentOffsetFactor<T>;
        const float m = offset(max[r], scale);
        if (!(fabsf(m) < kLargeScore)) return fmaf(max[r], scale.natural, ptx::log2_approx(l) * kLn2);
        return (m - kExponentOffset<T> + ptx::log2_approx(l)) * kLn2;
    }

    /// After finish(): 1 / l, the factor of O; 0 for a row without keys.
    __device__ __forceinline__ float inverse_sum(int r) const {
        return sum[r] == 0.0F ? 0.0F : ptx::reciprocal_approx(sum[r]);
    }

 private:
    /// m in units of log2, plus the exponent offset. With no visible key so far, exp(-inf - 0) gives the right 0.
    __device__ static __forceinline__ float offset(float m, const Scale& scale) {
        return m == -INFINITY ? kExponentOffset<T> : fmaf(m, scale.log2, kExponentOffset<T>);
    }
};

}  // namespace tessera::cuda
