// SPDX-License-Identifier: Apache-2.0
//
// tanh for a softcap: near 0, where 1 - 2 / (exp(2 |x|) + 1) cancels, an odd polynomial. Plain C++.
#pragma once

namespace tessera::cuda {

/// tanh(x) / x = 1 + sum of these times x^2, x^4, ... on |x| < kTanhNear, to 4e-8: the smallest largest error.
inline constexpr double kTanhNear = 0.55;
inline constexpr double kTanh[4] = {-0.33332957, 0.13320941, -0.05268411, 0.01645871};

}  // namespace tessera::cuda
