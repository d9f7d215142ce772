// SPDX-License-Identifier: Apache-2.0
//
// fp16 scaling in the kernels of a backward (host/fp16_scale.hpp): powers of two as fp32 numbers, and the bounds that
// they follow from.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "cuda/backward/host/fp16_scale.hpp"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda {

template <class T>
inline constexpr bool kFp16Scaled = std::is_same_v<T, __half>;

/// P is stored times kPScale = 2^kPScaleExponent.
template <class T>
inline constexpr float kPScaleExponent = kFp16Scaled<T> ? float{kFp16PExponent} : 0.0F;
template <class T>
inline constexpr float kPScale = kFp16Scaled<T> ? float{1 << kFp16PExponent} : 1.0F;

/// The biased exponent of x >= 0.
__device__ __forceinline__ int biased_exponent(float x) { return __float_as_int(x) >> 23; }
/// 2^exponent, for -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

/// The bound of a row; 0 for a row that is not finite, which then does not count: its pairs have no finite gradient at
/// any scale.
__device__ __forceinline__ float finite_or_0(float bound) { return bound < INFINITY ? bound : 0.0F; }

/// Raises a bound in memory to the largest number of a warp's lanes, all >= 0. All lanes call it. A maximum does not
/// depend on the order, so the bits are the same in every run.
__device__ __forceinline__ void raise_bound(float& bound, float of_lane) {
    const int most = __reduce_max_sync(kAllLanes, __float_as_int(of_lane));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(reinterpret_cast<int*>(&bound), most);
}

}  // namespace tessera::cuda
