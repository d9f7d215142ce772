// SPDX-License-Identifier: Apache-2.0
//
// Constants that host and device code share. Plain C++.
#pragma once

namespace tessera::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

/// Scaled scores (in units of log2) of this size and more are large: the rounding of one shows in its exponential.
/// Smaller ones differ from the exact product by less than 2^-9, and P and l use the same maximum, so scaling and
/// subtraction may be one FMA. A large score and its maximum are rounded alike before they are subtracted, so that no
/// exponent is far over 0.
inline constexpr float kLargeScore = 32768.0F;

/// The largest |LSE| for which a backward computes P from the LSE, whose fp32 rounding P then tolerates
/// (docs/numerics.md). Rows with more have their largest score subtracted.
inline constexpr float kOrdinaryLse = 256;

}  // namespace tessera::cuda
