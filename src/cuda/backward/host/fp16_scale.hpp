// SPDX-License-Identifier: Apache-2.0
//
// The powers of two by which a backward in fp16 multiplies P and dS before it rounds them. fp16 overflows at 65,504 and
// is subnormal under 2^-14. The result of the GEMM is divided by the power again, which is exact. bf16 has the
// exponents of fp32 and needs none.
//
// P is at most 1, so one power serves all of it. The scale of dS follows from an upper bound of |dS|, which the delta
// kernels find: of a head split in fa3/backward, of a query head in gradient, of a row in standard.
#pragma once

#include <algorithm>

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// P times 2^15: the largest power that fp16 holds.
inline constexpr int kFp16PExponent = 15;

/// The scale of dS moves its bound into [2^kTop, 2^(kTop + 1)). Its exponent lies in [-kMaxExponent, kMaxExponent], so
/// that fp32 holds the scale and its quotients.
template <int kTop, int kMaxExponent>
struct Fp16DsScale {
    static constexpr int kMax = kMaxExponent;

    /// The exponent of the scale. `bound_exponent`: the biased exponent of the bound as an fp32 number. `largest`: an
    /// upper limit of the result.
    TESSERA_HOST_DEVICE static constexpr int exponent(int bound_exponent, int largest = kMaxExponent) {
        return std::min(largest, std::max(kTop + 127 - bound_exponent, -kMaxExponent));
    }
};

/// fa3/backward. Its bound has a margin, so it may come as near to 2^16 as fp16 reaches.
using Fp16DsScaleOfSplit = Fp16DsScale<15, 100>;
/// gradient and standard. gradient divides the scale of a head by that of a key (gradient/main/key_scale.cuh), so the
/// quotient of two scales has to fit fp32.
using Fp16DsScaleOfRows = Fp16DsScale<14, 60>;

}  // namespace tessera::cuda
