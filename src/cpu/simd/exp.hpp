// SPDX-License-Identifier: Apache-2.0
//
// Constants of the exponential for both paths: simd/exp-inl.hpp and matrix/inl/softmax-inl.hpp.
#pragma once

namespace tessera::cpu::simd {

/// exp(x) for x <= 0, to 4e-7 relative, 2e-7 for results over 2^-20; exp(0) is exactly 1, exp(-inf) exactly 0, NaN
/// stays NaN.
///
/// x = n ln 2 + r, |r| <= ln 2 / 2;  exp(r) = 1 + r P(r), P the degree-4 minimax polynomial of (exp(r) - 1) / r for
/// relative error (fitted in fp64), its highest coefficient first.
namespace exp {
inline constexpr float kLog2E = 1.44269504F;
inline constexpr float kLn2 = 0.693147181F;
inline constexpr float kPolynomial[] = {0x1.0fa7d8p-7F, 0x1.573ad0p-5F, 0x1.555a6ep-3F, 0x1.fffdc4p-2F, 0x1.fffff6p-1F};
inline constexpr float kLowest = -87.33654F;  ///< ln 2^-126: under it results would be subnormal, which are slow
/// Adding it rounds to an integer, which then stands in the lowest bits: 1.5 * 2^23.
inline constexpr float kRounder = 12582912.0F;
}  // namespace exp

}  // namespace tessera::cpu::simd
