// SPDX-License-Identifier: Apache-2.0
//
// From a limit over all |dS| of a head to the power of two that it is held times, in fp16.
#pragma once

#include <algorithm>

#include "cuda/gradient/launch.hpp"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::gradient {

inline constexpr int kUnitThreads = 128;

/// A kv head a thread. Powers of a group are not further apart than sums of dK in fp32 can be moved.
template <class T>
__global__ void __launch_bounds__(kUnitThreads) units_kernel(const __grid_constant__ Launch launch) {
    constexpr int kMost = 60;
    constexpr int kMostApart = 40;
    const ForwardParams& p = launch.params.forward;
    const std::int64_t kv_head = std::int64_t{blockIdx.x} * kUnitThreads + threadIdx.x;
    if (kv_head >= launch.heads()) return;
    const std::int64_t first = kv_head * p.group;
    const float largest_value = sqrtf(launch.v_squares[kv_head]);
    int largest = 0;
    for (int i = 0; i < p.group; ++i) {
        float& limit = launch.limits[first + i];
        limit = fmaf(sqrtf(launch.do_squares[first + i]), largest_value, limit);
        largest = max(largest, __float_as_int(limit) >> 23);
    }
    for (int i = 0; i < p.group; ++i) {
        float& limit = launch.limits[first + i];
        const int exponent = max(__float_as_int(limit) >> 23, largest - kMostApart);
        const int power = largest == 0 ? 0 : min(max(14 + 127 - exponent, -kMost), kMost);
        limit = __int_as_float((127 + power) << 23);
    }
}

template <class T>
cudaError_t start_units(const Launch& launch, cudaStream_t stream) {
    const std::int64_t blocks = (launch.heads() + kUnitThreads - 1) / kUnitThreads;
    return start(units_kernel<T>, blocks, kUnitThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
