// SPDX-License-Identifier: Apache-2.0
//
// Powers of two that P and dS are held times in 16 bits: fp16 has neither large numbers nor small ones; bf16 needs
// none. P is at most 1, so its power is fixed. That of dS is one for a kv head and its query heads, for dK is a sum
// over these: by a limit over all |dS| that the delta kernels find (|dS| <= |dP - delta|, as P <= 1). Results are
// multiplied by the powers' inverses, which is exact.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "cuda/fa3/backward/launch.hpp"

namespace tessera::cuda::fa3::backward {

template <class T>
inline constexpr bool kHeld = std::is_same_v<T, __half>;

/// P is held 2^kWeightExponent times its value. 2^15 is the most that fits (tile/exponent_offset.cuh).
template <class T>
inline constexpr float kWeightExponent = kHeld<T> ? 15.0F : 0.0F;
template <class T>
inline constexpr float kWeightUnit = kHeld<T> ? 0x1p15F : 1.0F;

/// What dS of a kv head and its query heads, or of a share of these, is held times.
template <class T>
__device__ __forceinline__ float gradient_unit(const Launch& launch, int batch, int kv_head, int share) {
    constexpr int kMost = 100;
    const Limits* const of_group =
        launch.limits + (std::int64_t{batch} * launch.params.forward.heads_kv + kv_head) * launch.shares;
    const Limits& limits = of_group[share];
    // A little more: P passes 1 by the rounding of LSE, and sums are rounded.
    const float most = 1.01F * (sqrtf(limits.d_o_squares) * sqrtf(of_group->v_squares) + limits.sum);
    if (most == 0) return 1;
    const int exponent = (__float_as_int(most) >> 23) - 127;
    return __int_as_float((127 + min(max(15 - exponent, -kMost), kMost)) << 23);
}

/// (dP - delta) P, `p` being held 2^kWeightExponent times P, as it is rounded to 16 bits. `unit`: Shared::unit; `delta`
/// comes times it.
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float unit) {
    if constexpr (kHeld<T>) return p * fmaf(dp, unit, -delta);
    else return p * (dp - delta);
}

template <class T, int kCount>
__device__ __forceinline__ void hold_deltas(float4 (&deltas)[kCount], float unit) {
    if constexpr (kHeld<T>) {
#pragma unroll
        for (float4& four : deltas) four = make_float4(four.x * unit, four.y * unit, four.z * unit, four.w * unit);
    }
}

/// A limit of a row; rows whose dS are not finite have none.
__device__ __forceinline__ float finite_or_0(float limit) { return limit < INFINITY ? limit : 0.0F; }

/// The largest of a warp's limits, to the limit of a head: its order does not show. All lanes come.
__device__ __forceinline__ void raise_limit(float& limit, float of_lane) {
    const int most = __reduce_max_sync(0xFFFFFFFF, __float_as_int(of_lane));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(reinterpret_cast<int*>(&limit), most);
}

}  // namespace tessera::cuda::fa3::backward
