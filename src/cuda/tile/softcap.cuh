// SPDX-License-Identifier: Apache-2.0
//
// tanh for a softcap, without a branch: 1 - 2 / (exp(2 |x|) + 1), and near 0, where that cancels, an odd polynomial.
// In fp32 the kernels call tanhf, which is more exact.
#pragma once

#include "cuda/host/constants.hpp"
#include "cuda/host/softcap.hpp"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// (tanh(x) / x - 1) / u for u = x^2: c[0] + c[1] u + c[2] u^2 + c[3] u^3.
__device__ __forceinline__ float tanh_near(float u, const float (&c)[4]) {
    float p = fmaf(c[3], u, c[2]);
    p = fmaf(p, u, c[1]);
    return fmaf(p, u, c[0]);
}

/// tanh(x) for x = exponent * ln(2) / 2 > 0.
__device__ __forceinline__ float tanh_far(float exponent) {
    return fmaf(-2.0F, ptx::reciprocal_approx(ptx::exp2_approx(exponent) + 1.0F), 1.0F);
}

/// tanh(x) with a relative error of 4e-7.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    constexpr float kCoefficients[4] = {static_cast<float>(kTanh[0]), static_cast<float>(kTanh[1]),
                                        static_cast<float>(kTanh[2]), static_cast<float>(kTanh[3])};
    const float far = tanh_far(fabsf(x) * (2 * kLog2E));
    const float u = x * x;
    const float p = tanh_near(u, kCoefficients);
    const float near = fmaf(x * u, p, x);
    return fabsf(x) < static_cast<float>(kTanhNear) ? near : copysignf(far, x);
}

}  // namespace tessera::cuda
