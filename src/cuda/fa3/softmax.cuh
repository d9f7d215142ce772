// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on the accumulators of wgmma: a thread holds two rows (r = 0, 1), a quad of threads a whole row.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3 {

inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

/// Element 4 * j + 2 * r + e of an accumulator is row r, column 8 * j + 2 * (lane % 4) + e.
constexpr int row_of(int element) { return element / 2 % 2; }
constexpr int column_of(int element) { return element / 4 * 8 + element % 2; }

/// Scores of pairs that are not visible become -inf. `row`: the thread's first row in the tile of queries.
template <int kCount, class Work>
__device__ __forceinline__ void hide(float (&scores)[kCount], const Work& work, int row, int first_key, int lane) {
    const int query = work.q_begin + row;
    const int shift = first_key + 2 * (lane % 4);  // relative to this, columns are compile-time numbers
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = row_of(i);
        const int first = query + 8 * r + work.low - shift;
        const int last = min(query + 8 * r + work.high, work.last_key) - shift;
        if (column_of(i) < first || column_of(i) > last) scores[i] = -INFINITY;
    }
}

/// P in bf16 is held 2^-32 times its value: the sum of P V then stays finite for every finite V, however many keys
/// there are, and nothing is lost, since bf16 has the exponents of fp32. fp16 has not, but its V can't overflow the
/// sum.
template <class T>
inline constexpr float kHeadroom = std::is_same_v<T, __half> ? 0.0F : 32.0F;

/// Scaled maxima under this differ from an exact product by less than 2^-9: harmless, since p and l use the same m.
/// Over it, the scaled score is rounded before m is subtracted, so that no exponent is ever far over 0.
inline constexpr float kExactProducts = 32768.0F;

/// Running maximum m (in units of log2: scaled) and sum l of two rows. l is this thread's share until finish().
template <class T>
struct RowState {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};

    /// Takes in the scores of one block, [2 rows][kCount / 2 columns], and turns them into p = exp2(scale * (s - m)).
    /// Returns what O has to be multiplied by. What a row gets depends on that row alone.
    template <int kCount>
    __device__ __forceinline__ float2 absorb(float (&scores)[kCount], float scale_log2);

    /// Sums over the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
            sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
        }
    }
    /// After finish(): the natural logarithm of the row's sum of exponentials; -inf for a row without keys.
    __device__ __forceinline__ float lse(int r) const {
        constexpr float kUnit = kHeadroom<T> == 0 ? 1.0F : 0x1p32F;
        return (max[r] + log2f(sum[r] * kUnit)) * kLn2;
    }
    __device__ __forceinline__ float inverse_sum(int r) const { return sum[r] == 0.0F ? 0.0F : 1.0F / sum[r]; }
};

/// The largest score of each of the two rows, over the quad. Four chains a row, so that none waits for its last step.
template <int kCount>
__device__ __forceinline__ float2 row_max(const float (&scores)[kCount]) {
    constexpr int kChains = 4;
    float chain[2][kChains];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int c = (i / 4 * 2 + i % 2) % kChains;
        chain[row_of(i)][c] = i < 2 * kChains ? scores[i] : fmaxf(chain[row_of(i)][c], scores[i]);
    }
    float result[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float m = fmaxf(fmaxf(chain[r][0], chain[r][1]), fmaxf(chain[r][2], chain[r][3]));
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
        result[r] = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
    }
    return {result[0], result[1]};
}

template <class T>
template <int kCount>
__device__ __forceinline__ float2 RowState<T>::absorb(float (&scores)[kCount], float scale_log2) {
    const float2 block_max = row_max(scores);
    float rescale[2], subtract[2], factor[2];
    bool large[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = max[r];
        // Rounded as the subtraction below will round it: m is what is subtracted, to the last bit, in O, l and LSE.
        max[r] = fmaxf(before, __fmul_rn(r == 0 ? block_max.x : block_max.y, scale_log2)) + kHeadroom<T> - kHeadroom<T>;
        const float now = max[r] == -INFINITY ? 0.0F : max[r];  // nothing visible yet: exp2(-inf - 0) is the 0 wanted
        rescale[r] = ptx::exp2_approx(before - now);
        large[r] = fabsf(now) >= kExactProducts;
        factor[r] = scale_log2;
        subtract[r] = now + kHeadroom<T>;
    }
    if (__any_sync(kAllLanes, large[0] || large[1])) {  // rare, and out of the way of the loop below
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int r = row_of(i);
            const float now = max[r] == -INFINITY ? 0.0F : max[r];
            if (large[r]) scores[i] = __fmul_rn(scores[i], scale_log2) - now;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = large[r] ? 1.0F : factor[r];
            subtract[r] = large[r] ? kHeadroom<T> : subtract[r];
        }
    }
    float parts[2][2];  // two partial sums a row: short chains, and small rounding errors over long rows
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = row_of(i);
        scores[i] = ptx::exp2_approx(fmaf(scores[i], factor[r], -subtract[r]));
        parts[r][i % 2] = i < 4 ? scores[i] : parts[r][i % 2] + scores[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], parts[r][0] + parts[r][1]);
    return {rescale[0], rescale[1]};
}

}  // namespace tessera::cuda::fa3
