// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on accumulators of mma.m16n8k16: a thread holds parts of two rows (r = 0, 1: 8 rows apart), a quad of
// threads holds whole rows. s[kTiles][4]: element e of tile j is row e / 2, column 8 * j + e % 2.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/constants.hpp"

namespace tessera::cuda {

/// P is held 2^-kWeightShift times its value. In bf16 that is 2^-32 times: the sum of P V then stays finite for every
/// finite V, and nothing is lost, since bf16 has the exponents of fp32. fp16 has not: there it is 2^15 times, the most
/// that fits, so that only weights under 2^-29 are rounded as subnormal numbers; V in fp16 can't overflow an fp32 sum.
template <class T>
inline constexpr float kWeightShift = std::is_same_v<T, __half> ? -15.0F : 32.0F;

/// 2^kWeightShift.
template <class T>
inline constexpr float kWeightUnit = std::is_same_v<T, __half> ? 0x1p-15F : 0x1p32F;

/// From here on (in units of log2) the rounding of a score shows in the exponent: score and maximum are then rounded
/// alike, before they are subtracted, so that no exponent is over 0.
inline constexpr float kFusedLimit = 32768.0F;

/// What scores are multiplied by, over 0: S = natural * Q K^T, and the same in units of log2.
struct Scale {
    float natural = 1;
    float log2 = kLog2E;
};

/// What the scores of a block did to the maxima of two rows.
struct Raised {
    float before[2];   // the maxima that were
    float rescale[2];  // what O and l have to be multiplied by
    float factor[2];   // the exponent of a weight is fma(score, factor, -offset)
    float offset[2];

    __device__ __forceinline__ bool any() const { return rescale[0] != 1.0F || rescale[1] != 1.0F; }
    __device__ __forceinline__ bool large(int r) const { return !(fabsf(offset[r]) < kFusedLimit); }
    __device__ __forceinline__ bool any_large() const { return large(0) || large(1); }
};

/// Maximum m (of the scores as they come) and sum l of two rows. A block of scores is taken in by raise(), which finds
/// the new m, then weigh(), which makes weights of the scores, and add(); absorb() does it all. What a row gets depends
/// on that row alone: not on its neighbours in the warp, nor on blocks of which it sees no key.
template <class T>
struct alignas(16) RowPair {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};  // the thread's share until finish(), 2^-kWeightShift times its value

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
        for (int r = 0; r < 2; ++r) {
            found[r] = fmaxf(found[r], __shfl_xor_sync(0xFFFFFFFF, found[r], 1));
            found[r] = fmaxf(found[r], __shfl_xor_sync(0xFFFFFFFF, found[r], 2));
        }
        return {found[0], found[1]};
    }

    __device__ __forceinline__ Raised raise(const float2& maxima, const Scale& scale) {
        Raised raised;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            raised.before[r] = max[r];
            max[r] = r == 0 ? maxima.x : maxima.y;
            raised.factor[r] = scale.log2;
            raised.offset[r] = offset(max[r], scale);
            raised.rescale[r] =
                ptx::exp2_approx(fmaf(raised.before[r], scale.log2, kWeightShift<T>) - raised.offset[r]);
        }
        return raised;
    }

    /// For rows whose maximum is large: scores become differences to it, both rounded before.
    template <int kTiles>
    __device__ __forceinline__ void subtract(float (&s)[kTiles][4], const Scale& scale, Raised& raised) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!raised.large(r)) continue;
            const float m = __fmul_rn(max[r], scale.natural);
            raised.rescale[r] = ptx::exp2_approx((__fmul_rn(raised.before[r], scale.natural) - m) * kLog2E);
            raised.factor[r] = kLog2E;
            raised.offset[r] = kWeightShift<T>;
#pragma unroll
            for (int i = 0; i < 2 * kTiles; ++i) {
                float& score = s[i / 2][2 * r + i % 2];
                score = __fadd_rn(__fmul_rn(score, scale.natural), -m);
            }
        }
    }

    /// Scores of 8 columns become weights p = 2^-kWeightShift * exp(score - m), and are added to `part`.
    __device__ static __forceinline__ void weigh(float (&s)[4], const Raised& raised, float (&part)[2]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[e] = ptx::exp2_approx(fmaf(s[e], raised.factor[e / 2], -raised.offset[e / 2]));
            part[e / 2] += s[e];
        }
    }

    /// l for the maxima that are now. Here and in add(): not to be fused in one copy of the code and left apart in
    /// another, or a row's bits would depend on where in a tile it is.
    __device__ __forceinline__ void rescale(const Raised& raised) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fmul_rn(sum[r], raised.rescale[r]);
    }

    /// Adds the sums of a block: one number each, so that rounding errors stay small over long rows.
    __device__ __forceinline__ void add(const float (&part)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(sum[r], part[r]);
    }

    /// `rescale`: what O has to be multiplied by.
    template <int kTiles>
    __device__ __forceinline__ void absorb(float (&s)[kTiles][4], const Scale& scale, float (&rescale)[2]) {
        Raised raised = raise(maxima(s), scale);
        if (__any_sync(0xFFFFFFFF, raised.any_large())) subtract(s, scale, raised);
        this->rescale(raised);
        float part[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) weigh(s[j], raised, part);
        add(part);
        rescale[0] = raised.rescale[0];
        rescale[1] = raised.rescale[1];
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
        const float l = sum[r] * kWeightUnit<T>;
        const float m = offset(max[r], scale);
        if (!(fabsf(m) < kFusedLimit)) return fmaf(max[r], scale.natural, ptx::log2_approx(l) * kLn2);
        return (m - kWeightShift<T> + ptx::log2_approx(l)) * kLn2;
    }

    /// After finish(): what O has to be multiplied by; 0 for a row without keys.
    __device__ __forceinline__ float inverse_sum(int r) const {
        return sum[r] == 0.0F ? 0.0F : ptx::reciprocal_approx(sum[r]);
    }

 private:
    /// m in units of log2, and the weight shift. Nothing visible yet: exp(-inf - 0) is the 0 that is wanted.
    __device__ static __forceinline__ float offset(float m, const Scale& scale) {
        return m == -INFINITY ? kWeightShift<T> : fmaf(m, scale.log2, kWeightShift<T>);
    }
};

}  // namespace tessera::cuda
