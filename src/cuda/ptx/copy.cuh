// SPDX-License-Identifier: Apache-2.0
//
// cp.async and its arrival at an mbarrier (PTX manual, "Data Movement and Conversion Instructions"): one function = one
// instruction. mma.cuh has cp.async with zeros instead of a read.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::ptx {

/// cp.async.cg, 16 bytes past the L1; nothing unless `copies`.
__device__ __forceinline__ void cp_async_16_if(bool copies, std::uint32_t to, const void* from) {
    const int wanted = copies ? 1 : 0;
    asm volatile(
        "{\n.reg .pred copies;\nsetp.ne.s32 copies, %0, 0;\n@copies cp.async.cg.shared.global [%1], [%2], 16;\n}\n"
        :
        : "r"(wanted), "r"(to), "l"(from)
        : "memory");
}

/// cp.async.mbarrier.arrive.noinc: arrives when all earlier cp.async of this thread are complete.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Mbarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

}  // namespace tessera::cuda::ptx
