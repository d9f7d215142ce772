// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on accumulators of mma.m16n8k16: a thread holds parts of two rows (r = 0, 1: 8 rows apart), a quad of
// threads holds whole rows. s[kTiles][4]: element e of tile j is row e / 2, column 8 * j + e % 2.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kNaturalLog2 = 0.6931471805599453F;

/// P in bf16 is held 2^-32 times its value: the sum of P V then stays finite for every finite V, and nothing is lost,
/// since bf16 has the exponents of fp32. fp16 has not, but its V can't overflow an fp32 sum.
template <class T>
inline constexpr float kWeightShift = std::is_same_v<T, __half> ? 0.0F : 32.0F;

/// From here on the rounding of score * scale shows in the exponent (2^-9): score and maximum are then rounded alike,
/// before they are subtracted, so that no exponent is over 0.
inline constexpr float kFusedLimit = 32768.0F;

/// What scores are multiplied by: S = natural * Q K^T, and the same in units of log2.
struct Scale {
    float natural = 1;
    float log2 = kLog2E;
};

/// Maximum m (of the scores as they come) and sum l of two rows.
/// kScaled: scores come without the scale, which is over 0, and the exponent is one fused operation where that is
/// harmless. Otherwise they come in units of the natural logarithm.
template <class T, bool kScaled>
struct RowPair {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};  // the thread's share until finish(), 2^-kWeightShift times its value

    /// Takes in the scores of one block and turns them into p = 2^-kWeightShift * exp(score - m). `rescale`: what O has
    /// to be multiplied by. What a row gets depends on that row alone.
    template <int kTiles>
    __device__ __forceinline__ void absorb(float (&s)[kTiles][4], const Scale& scale, float (&rescale)[2]) {
        float block_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) block_max[e / 2] = fmaxf(block_max[e / 2], s[j][e]);
        }
        float now[2];
        bool apart[2];  // product and difference can't be fused
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(0xFFFFFFFF, block_max[r], 1));
            block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(0xFFFFFFFF, block_max[r], 2));
            const float before = max[r];
            max[r] = fmaxf(before, block_max[r]);
            now[r] = finite_max(r);
            apart[r] = !fused(now[r], scale);
            rescale[r] = ptx::exp2_approx(apart[r] ? difference(before, now[r], scale)
                                                   : scaled_max(before, scale) - scaled_max(now[r], scale));
            sum[r] *= rescale[r];
        }
        if (!kScaled || __any_sync(0xFFFFFFFF, apart[0] || apart[1])) exponentials_apart(s, now, apart, scale);
        else exponentials(s, now, scale);
        add(s);
    }

    /// Sums over the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xFFFFFFFF, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xFFFFFFFF, sum[r], 2);
        }
    }

    /// After finish(): the natural logarithm of the sum of exponentials; -inf for a row without keys.
    __device__ __forceinline__ float lse(int r, const Scale& scale) const {
        constexpr float kUnit = kWeightShift<T> == 0 ? 1.0F : 0x1p32F;
        const float l = sum[r] * kUnit;
        const float m = finite_max(r);
        if (!fused(m, scale)) return m * scale.natural + logf(l);
        return (scaled_max(m, scale) + log2f(l)) * kNaturalLog2;
    }

    /// After finish(): what O has to be multiplied by; 0 for a row without keys.
    __device__ __forceinline__ float inverse_sum(int r) const { return sum[r] == 0.0F ? 0.0F : 1.0F / sum[r]; }

 private:
    /// Nothing visible yet: exp(-inf - 0) is the 0 that is wanted.
    __device__ __forceinline__ float finite_max(int r) const { return max[r] == -INFINITY ? 0.0F : max[r]; }

    __device__ static __forceinline__ bool fused(float m, const Scale& scale) {
        return kScaled && fabsf(__fmul_rn(m, scale.log2)) < kFusedLimit;
    }

    /// m in units of log2, rounded as the subtraction will round it: to the last bit what O, l and LSE share.
    __device__ static __forceinline__ float scaled_max(float m, const Scale& scale) {
        return __fmul_rn(m, scale.log2) + kWeightShift<T> - kWeightShift<T>;
    }

    /// score - m in units of log2.
    __device__ static __forceinline__ float difference(float score, float m, const Scale& scale) {
        if constexpr (!kScaled) return (score - m) * kLog2E;
        return (__fmul_rn(score, scale.natural) - __fmul_rn(m, scale.natural)) * kLog2E;
    }

    template <int kTiles>
    __device__ static __forceinline__ void exponentials(float (&s)[kTiles][4], const float (&now)[2],
                                                        const Scale& scale) {
        const float shift[2] = {-(scaled_max(now[0], scale) + kWeightShift<T>),
                                -(scaled_max(now[1], scale) + kWeightShift<T>)};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = ptx::exp2_approx(fmaf(s[j][e], scale.log2, shift[e / 2]));
        }
    }

    template <int kTiles>
    __device__ static __forceinline__ void exponentials_apart(float (&s)[kTiles][4], const float (&now)[2],
                                                              const bool (&apart)[2], const Scale& scale) {
        const float shift[2] = {-(scaled_max(now[0], scale) + kWeightShift<T>),
                                -(scaled_max(now[1], scale) + kWeightShift<T>)};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float exponent = difference(s[j][e], now[e / 2], scale) - kWeightShift<T>;
                s[j][e] = ptx::exp2_approx(apart[e / 2] ? exponent : fmaf(s[j][e], scale.log2, shift[e / 2]));
            }
        }
    }

    /// Two partial sums a row: short chains, and small rounding errors over long rows.
    template <int kTiles>
    __device__ __forceinline__ void add(const float (&p)[kTiles][4]) {
        float parts[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) parts[e] += p[j][e];
        }
        sum[0] += parts[0] + parts[1];
        sum[1] += parts[2] + parts[3];
    }
};

}  // namespace tessera::cuda
