// SPDX-License-Identifier: Apache-2.0
//
// Numbers that host and device code share. Plain C++.
#pragma once

namespace tessera::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

}  // namespace tessera::cuda
