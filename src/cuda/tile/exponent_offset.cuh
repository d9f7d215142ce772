// SPDX-License-Identifier: Apache-2.0
//
// P and l carry a common factor 2^-kExponentOffset, which cancels in O = P V / l. T is the type of P's elements.
//
//   T            P up to 1   P up to 2^8 (fa3)
//   bf16, fp32      32          32    P V stays finite for every finite V, whatever the number of keys. Nothing is
//                                     lost, since bf16 has the exponents of fp32. fp32 in
//                                     parts loses last digits of P under 2^-78.
//   fp16           -15           0    V in fp16 can't overflow a sum in fp32. 2^15 is the largest factor that fits; it
//                                     leaves only P under 2^-29 subnormal. P over 1 has no room for a factor.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace tessera::cuda {

/// kOver: P is up to 2^kOver.
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
