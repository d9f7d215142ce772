// SPDX-License-Identifier: Apache-2.0
//
// Bits and predicates: one function = one instruction, two where a comparison stands in front.
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

/// setp, and add under it: sum += addend, if word <= most.
__device__ __forceinline__ void add_if_at_most(std::uint32_t& sum, std::uint32_t addend, std::uint32_t word,
                                               std::uint32_t most) {
    asm("{\n.reg .pred add;\nsetp.le.u32 add, %2, %3;\n@add add.u32 %0, %0, %1;\n}\n"
        : "+r"(sum)
        : "r"(addend), "r"(word), "r"(most));
}

}  // namespace tessera::cuda::ptx
