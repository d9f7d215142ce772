// SPDX-License-Identifier: Apache-2.0
//
// tanh for a softcap, what host and device share; the arithmetic is in softcap.cuh. Plain C++.
#pragma once

namespace tessera::cuda {

/// tanh(x) / x = 1 + sum of these times x^2, x^4, ... on |x| < kTanhNear, to 4e-8: the smallest largest error.
inline constexpr double kTanhNear = 0.55;
inline constexpr double kTanh[4] = {-0.33332958817, 0.13320940733, -0.05268411338, 0.01645870879};

}  // namespace tessera::cuda
