// SPDX-License-Identifier: Apache-2.0
//
// P and dS of one pair of a query and a key.
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda::fa3::backward {

/// P of a score, which is scaled by scale_log2 to units of log2. For queries whose |LSE| is large, `minus_lse` is minus
/// the largest score and `inverse_sum` is 1 / sum.
__device__ __forceinline__ float probability(float score, float scale_log2, float minus_lse, float inverse_sum) {
    const float ordinary = fmaf(score, scale_log2, minus_lse);
    const float beside_most = __fadd_rn(__fmul_rn(score, scale_log2), minus_lse);
    return ptx::exp2_approx(inverse_sum == 0 ? ordinary : beside_most) * (inverse_sum == 0 ? 1.0F : inverse_sum);
}

/// dS = P (dP - delta), scaled for 16 bits. `p` is P times kPScale; in fp16 `delta` comes times ds_factor.
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float ds_factor) {
    if constexpr (kFp16Scaled<T>) return p * fmaf(dp, ds_factor, -delta);
    else return p * (dp - delta);
}

}  // namespace tessera::cuda::fa3::backward
