// SPDX-License-Identifier: Apache-2.0
//
// m and l, at three levels: a warp's own keys, the key block of all warps, and a query's blocks so far.
#pragma once

#include "cuda/fa1/host/config.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::fa1 {

/// exp(m - larger); 0 for m = -inf, a row without visible keys.
__device__ __forceinline__ float decay(float m, float larger) { return ptx::exp2_approx((m - larger) * kLog2E); }

__device__ __forceinline__ float finite_max(float m) { return m == -INFINITY ? 0.0F : m; }

/// Softmax of 16 rows over a warp's keys: S becomes P = 2^-kExponentOffset * exp(S - m). A quad of lanes shares two
/// rows. Returns (m, l) of both.
template <class T, int kTiles>
__device__ __forceinline__ void exponentiate(float (&s)[kTiles][4], float2 (&ml)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float m = -INFINITY;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) m = fmaxf(m, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
        m = quad_max(m);
        const float subtracted = finite_max(m);
        float l[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& p = s[j][2 * r + e];
                p = ptx::exp2_approx((p - subtracted) * kLog2E - kExponentOffset<T>);
                l[e] += p;
            }
        }
        ml[r] = {m, quad_sum(l[0] + l[1])};
    }
}

/// Lines 10 to 12 of the algorithm for one row: the factors of the old O and of the warps' partial sums.
struct Combination {
    float2 ml;              // m and l of the row, including this block
    float of_old;           // exp(m_old - m) l_old / l
    float of_part[kWarps];  // exp(m_w - m) / l

    __device__ __forceinline__ void set(float2 old, const float2 (&parts)[kWarps]) {
        float m = old.x;
#pragma unroll
        for (const float2& part : parts) m = fmaxf(m, part.x);
        const float larger = finite_max(m);
        const float old_l = decay(old.x, larger) * old.y;
        float sums[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            of_part[w] = decay(parts[w].x, larger);
            sums[w] = of_part[w] * parts[w].y;
        }
        // Added in pairs, so that every warp gets the same bits, though each begins with its own part.
        const float l = old_l + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        // old_l / l is exactly 1 where the block is hidden from the row, which leaves O as it is; old_l * (1 / l) is
        // not.
        of_old = l == 0 ? 0 : old_l / l;
        const float inverse = l == 0 ? 0 : 1 / l;
#pragma unroll
        for (float& part : of_part) part *= inverse;
        ml = {m, l};
    }

    /// The Combination of lane `lane`, without its m and l.
    __device__ __forceinline__ Combination of_lane(int lane) const {
        Combination other;
        other.of_old = __shfl_sync(kAllLanes, of_old, lane);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) other.of_part[w] = __shfl_sync(kAllLanes, of_part[w], lane);
        return other;
    }
};

}  // namespace tessera::cuda::fa1
