// SPDX-License-Identifier: Apache-2.0
//
// The powers of two by which fp16 operands are multiplied. fp16 overflows at 65,504 and is subnormal under 2^-14, so P
// and dS are rounded after a multiplication by a power of two, and the result of the GEMM is divided by it again. bf16
// has the exponents of fp32 and needs none.
#pragma once

#include <algorithm>

#include "tessera/mask.hpp"

namespace tessera::cuda::gradient {

/// P is at most 1, so one power serves all of it: 2^15.
inline constexpr int kFp16ProbabilityExponent = 15;
/// Exponents of the scale of dS lie in [-60, 60], so that fp32 holds the scale and its quotients.
inline constexpr int kFp16MaxScaleExponent = 60;
/// Exponents of the query heads of one group differ by at most this: dK adds up all of them, in fp32.
inline constexpr int kFp16MaxScaleSpread = 40;

/// The exponent of the scale for numbers up to `bound`, which it moves into [2^14, 2^15). `bound_exponent`: the biased
/// exponent of the bound as an fp32 number. `largest`: an upper limit of the result.
TESSERA_HOST_DEVICE constexpr int fp16_scale_exponent(int bound_exponent, int largest = kFp16MaxScaleExponent) {
    return std::min(largest, std::max(14 + 127 - bound_exponent, -kFp16MaxScaleExponent));
}

}  // namespace tessera::cuda::gradient
