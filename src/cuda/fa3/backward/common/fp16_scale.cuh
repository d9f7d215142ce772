// SPDX-License-Identifier: Apache-2.0
//
// fp16: the scale of dS (cuda/backward/host/fp16_scale.hpp). It is one for the query heads of a head split, since dK is
// a sum over these. It follows from an upper bound for |dS| that the delta kernels find: |dS| <= |dP - delta|, as
// P <= 1.
#pragma once

#include "cuda/backward/fp16_scale.cuh"
#include "cuda/fa3/backward/launch.hpp"

namespace tessera::cuda::fa3::backward {

/// The scale by which dS of a head split is multiplied when it is stored.
template <class T>
__device__ __forceinline__ float ds_scale(const Launch& launch, int batch, int kv_head, int split) {
    const DsBounds* const of_group =
        launch.workspace.ds_bounds +
        (std::int64_t{batch} * launch.params.forward.heads_kv + kv_head) * launch.key_blocks.splits;
    const DsBounds& bounds = of_group[split];
    // 1 % more, since the rounding of LSE lets P pass 1, and sums are rounded.
    const float largest_dp =
        sqrtf(bounds.max_do_squares) * sqrtf(of_group->max_v_squares) * launch.params.forward.keep_scale;
    const float most = 1.01F * (largest_dp + bounds.addend);
    if (most == 0) return 1;
    return power_of_two(Fp16DsScaleOfSplit::exponent(biased_exponent(most)));
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

}  // namespace tessera::cuda::fa3::backward
