// SPDX-License-Identifier: Apache-2.0
//
// Bits: one function = one instruction.
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

/// prmt: fills the two lower bytes of the result with the sign bit of byte a, and the two upper ones with that of byte
/// b.
template <int a, int b>
__device__ __forceinline__ std::uint32_t byte_signs(std::uint32_t bytes) {
    std::uint32_t signs;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(bytes), "n"((8 + a) * 0x11 + (8 + b) * 0x1100));
    return signs;
}

}  // namespace tessera::cuda::ptx
