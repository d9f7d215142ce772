// SPDX-License-Identifier: Apache-2.0
//
// fp16 scaling: P and dS are stored multiplied by a power of two, which the epilogue removes exactly. fp16 overflows at
// 65,504 and is subnormal under 2^-14; bf16 has the exponents of fp32 and needs no scale.
//
// P is at most 1, so its scale is fixed. The scale of dS is one for the query heads of a head split, since dK is a sum
// over these. It follows from an upper bound for |dS| that the delta kernels find: |dS| <= |dP - delta|, as P <= 1.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::fa3::backward {

template <class T>
inline constexpr bool kFp16Scaled = std::is_same_v<T, __half>;

/// P is stored times 2^kPScaleExponent. 2^15 is the largest power of two that fits (tile/exponent_offset.cuh).
template <class T>
inline constexpr float kPScaleExponent = kFp16Scaled<T> ? 15.0F : 0.0F;
template <class T>
inline constexpr float kPScale = kFp16Scaled<T> ? 0x1p15F : 1.0F;

/// The scale by which dS of a head split is multiplied when it is stored.
template <class T>
__device__ __forceinline__ float ds_scale(const Launch& launch, int batch, int kv_head, int split) {
    constexpr int kMaxExponent = 100;
    const DsBounds* const of_group =
        launch.workspace.ds_bounds +
        (std::int64_t{batch} * launch.params.forward.heads_kv + kv_head) * launch.key_blocks.splits;
    const DsBounds& bounds = of_group[split];
    // 1 % more, since the rounding of LSE lets P pass 1, and sums are rounded.
    const float most = 1.01F * (sqrtf(bounds.max_do_squares) * sqrtf(of_group->max_v_squares) + bounds.addend);
    if (most == 0) return 1;
    const int exponent = (__float_as_int(most) >> 23) - 127;
    return __int_as_float((127 + min(max(15 - exponent, -kMaxExponent), kMaxExponent)) << 23);
}

/// Multiplies delta by ds_factor, the scale of dS over that of P.
template <class T, int kCount>
__device__ __forceinline__ void scale_deltas(float4 (&deltas)[kCount], float ds_factor) {
    if constexpr (kFp16Scaled<T>) {
#pragma unroll
        for (float4& four : deltas) {
            four = make_float4(four.x * ds_factor, four.y * ds_factor, four.z * ds_factor, four.w * ds_factor);
        }
    }
}

/// The bound of a row; 0 for rows whose dS is not finite, which then don't count.
__device__ __forceinline__ float finite_or_0(float bound) { return bound < INFINITY ? bound : 0.0F; }

/// Raises a bound in memory to the largest one of a warp's lanes, all of which call it. A maximum does not depend on
/// the order, so the bits are the same in every run.
__device__ __forceinline__ void raise_bound(float& bound, float of_lane) {
    const int most = __reduce_max_sync(kAllLanes, __float_as_int(of_lane));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(reinterpret_cast<int*>(&bound), most);
}

}  // namespace tessera::cuda::fa3::backward
