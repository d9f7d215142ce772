// SPDX-License-Identifier: Apache-2.0
//
// cp.async and its arrival at an mbarrier (PTX manual, "Data Movement and Conversion Instructions"): one function = one
// instruction. mma.cuh has cp.async with zeros instead of a read.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::ptx {

/// Eviction priority of loaded lines in L2, as createpolicy and CUTLASS encode it.
enum class CacheHint : std::uint64_t {
    normal = 0x1000000000000000,
    evict_first = 0x12F0000000000000,
    evict_last = 0x14F0000000000000,
};

/// cp.async.cg, 16 bytes past the L1; nothing unless `copies`.
__device__ __forceinline__ void cp_async_16_if(bool copies, std::uint32_t to, const void* from, CacheHint hint) {
    const int wanted = copies ? 1 : 0;
    asm volatile(
        "{\n.reg .pred copies;\nsetp.ne.s32 copies, %0, 0;\n"
        "@copies cp.async.cg.shared.global.L2::cache_hint [%1], [%2], 16, %3;\n}\n"
        :
        : "r"(wanted), "r"(to), "l"(from), "l"(static_cast<std::uint64_t>(hint))
        : "memory");
}

/// cp.async.mbarrier.arrive.noinc: arrives when all earlier cp.async of this thread are complete.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Mbarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

}  // namespace tessera::cuda::ptx
