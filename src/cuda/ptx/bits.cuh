// SPDX-License-Identifier: Apache-2.0
//
// Bits: one function = one instruction.
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

/// prmt: the signs of bytes a (of both lower bytes of the result) and b (of both upper ones), each byte full of it.
template <int a, int b>
__device__ __forceinline__ std::uint32_t byte_signs(std::uint32_t bytes) {
    std::uint32_t signs;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(bytes), "n"((8 + a) * 0x11 + (8 + b) * 0x1100));
    return signs;
}

}  // namespace tessera::cuda::ptx
