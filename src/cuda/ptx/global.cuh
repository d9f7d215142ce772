// SPDX-License-Identifier: Apache-2.0
//
// Numbers in global memory by which thread blocks tell each other how far they are (PTX manual, "Memory Consistency
// Model"): one function = one instruction.
#pragma once

namespace tessera::cuda::ptx {

/// ld.acquire.gpu: what the writer had written before its store_release() is seen by what follows.
__device__ __forceinline__ int load_acquire(const int* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
}

/// st.release.gpu
__device__ __forceinline__ void store_release(int* to, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

}  // namespace tessera::cuda::ptx
