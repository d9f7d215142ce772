// SPDX-License-Identifier: Apache-2.0
//
// The kernel that turns a bound of |dS| of each head into the fp16 scale of dS (cuda/backward/host/fp16_scale.hpp).
#pragma once

#include "cuda/backward/fp16_scale.cuh"
#include "cuda/gradient/launch.hpp"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::gradient {

inline constexpr int kFp16ScaleThreads = 128;
/// Exponents of the query heads of one group differ by at most this: dK adds up all of them, in fp32.
inline constexpr int kFp16MaxScaleSpread = 40;

/// A thread has the query heads of one kv head. With o_residual the bound is |delta| + |dO| |V|, by the largest rows.
template <class T>
__global__ void __launch_bounds__(kFp16ScaleThreads) fp16_scale_kernel(const __grid_constant__ Launch launch) {
    const ForwardParams& p = launch.params.forward;
    const std::int64_t kv_head = std::int64_t{blockIdx.x} * kFp16ScaleThreads + threadIdx.x;
    if (kv_head >= launch.kv_heads()) return;
    const std::int64_t first = kv_head * p.group;
    const float largest_value = sqrtf(launch.v_squares[kv_head]);
    int largest = 0;  // biased exponent of the group's largest bound
    for (int i = 0; i < p.group; ++i) {
        float& bound = launch.ds_scales[first + i];
        bound = fmaf(sqrtf(launch.do_squares[first + i]), largest_value, bound);
        largest = max(largest, biased_exponent(bound));
    }
    for (int i = 0; i < p.group; ++i) {
        float& scale = launch.ds_scales[first + i];
        const int exponent = max(biased_exponent(scale), largest - kFp16MaxScaleSpread);
        scale = power_of_two(largest == 0 ? 0 : Fp16DsScaleOfRows::exponent(exponent));
    }
}

template <class T>
cudaError_t start_fp16_scale(const Launch& launch, cudaStream_t stream) {
    const std::int64_t blocks = (launch.kv_heads() + kFp16ScaleThreads - 1) / kFp16ScaleThreads;
    return start(fp16_scale_kernel<T>, blocks, kFp16ScaleThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
