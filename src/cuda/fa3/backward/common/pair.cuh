// SPDX-License-Identifier: Apache-2.0
//
// P and dS of one pair of a query and a key.
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda::fa3::backward {

/// The exponent of a score relative to the largest one of its row, both in units of the natural logarithm, for rows
/// with a large |LSE|. All kernels round it alike.
__device__ __forceinline__ float exponent_beside(float score, float minus_largest) {
    return __fmul_rn(__fadd_rn(score, minus_largest), kLog2E);
}

/// P of a score, with the RowStats of its query. In shapes with a bias or for general scores the score has its scale
/// already.
template <Scores kScores>
__device__ __forceinline__ float probability(float score, const Launch& launch, float minus_lse, float inverse_sum) {
    constexpr bool kScaled = kScores == Scores::general || kScores == Scores::bias;
    const float scale = kScaled ? 1.0F : launch.params.forward.scale;
    const float ordinary = fmaf(score, launch.scale_log2, minus_lse);
    const float beside_most = exponent_beside(__fmul_rn(score, scale), minus_lse);
    return ptx::exp2_approx(inverse_sum == 0 ? ordinary : beside_most) * (inverse_sum == 0 ? 1.0F : inverse_sum);
}

/// dS = P (dP - delta), scaled for 16 bits. `p` is P times kPScale; in fp16 `delta` comes times ds_factor.
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float ds_factor) {
    if constexpr (kFp16Scaled<T>) return p * fmaf(dp, ds_factor, -delta);
    else return p * (dp - delta);
}

}  // namespace tessera::cuda::fa3::backward
