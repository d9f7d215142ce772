// SPDX-License-Identifier: Apache-2.0
//
// Words that thread blocks hand to each other through global memory (PTX manual, "Memory Consistency Model"): one
// function = one instruction. An access of 8 bytes is single-copy atomic, so both halves of a word arrive together.
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

/// st.relaxed.gpu.b64
__device__ __forceinline__ void store_relaxed(std::uint64_t* to, std::uint64_t word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(word) : "memory");
}

/// st.relaxed.gpu.v2.b64: two words at a multiple of 16 bytes, each atomic by itself.
__device__ __forceinline__ void store_relaxed(std::uint64_t* to, std::uint64_t first, std::uint64_t second) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "l"(first),
                 "l"(second)
                 : "memory");
}

/// ld.relaxed.gpu.v2.b64: two words at a multiple of 16 bytes, each atomic by itself.
__device__ __forceinline__ void load_relaxed(const std::uint64_t* from, std::uint64_t& first, std::uint64_t& second) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
}

/// atom.add.acq_rel.gpu: the number before the addition.
__device__ __forceinline__ unsigned add_acq_rel(unsigned* to, unsigned value) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(to)), "r"(value)
                 : "memory");
    return before;
}

}  // namespace tessera::cuda::ptx
