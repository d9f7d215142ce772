// SPDX-License-Identifier: Apache-2.0
//
// Constants of tanh for a softcap, shared by host and device; tile/softcap.cuh has the arithmetic. Plain C++.
#pragma once

namespace tessera::cuda {

/// Minimax polynomial: tanh(x) / x = 1 + kTanh[0] x^2 + kTanh[1] x^4 + ... on |x| < kTanhNear, to 4e-8.
inline constexpr double kTanhNear = 0.55;
inline constexpr double kTanh[4] = {-0.33332958817, 0.13320940733, -0.05268411338, 0.01645870879};

}  // namespace tessera::cuda
