// SPDX-License-Identifier: Apache-2.0
//
// P is held 2^-kExponentOffset times its value, l too; what is left over leaves with the division by l. T: of P's
// elements.
//
//   T           weights to 1   weights to 2^8 (fa3)
//   bf16, fp32       32             32    the sum of P V stays finite for every finite V, however many keys there are
//                                         nothing is lost, for bf16 has the exponents of fp32
//   fp16            -15              0    V in fp16 can't overflow a sum in fp32. 2^15 is the most that fits, so that
//                                         only weights under 2^-29 are rounded as subnormal numbers, and weights over
//                                         1 would not fit
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace tessera::cuda {

/// kOver: weights are up to 2^kOver.
template <class T, int kOver = 0>
inline constexpr float kExponentOffset = !std::is_same_v<T, __half> ? 32.0F
                                         : kOver == 0               ? -15.0F
                                                                    : 0.0F;

/// 2^kExponentOffset.
template <class T, int kOver = 0>
inline constexpr float kExponentOffsetFactor = !std::is_same_v<T, __half> ? 0x1p32F
                                               : kOver == 0               ? 0x1p-15F
                                                                          : 1.0F;

}  // namespace tessera::cuda
