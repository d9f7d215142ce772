// SPDX-License-Identifier: Apache-2.0
//
// Semaphores and sums of several thread blocks in global memory (PTX manual, "Memory Consistency Model"): one function
// = one instruction.
#pragma once

namespace tessera::cuda::ptx {

/// ld.acquire.gpu: what follows sees what the writer wrote before its store_release().
__device__ __forceinline__ int load_acquire(const int* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
}

/// ld.relaxed.gpu: a word that other thread blocks write. The order is that of an acquire before it.
__device__ __forceinline__ int load_relaxed(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)));
    return value;
}

/// st.release.gpu
__device__ __forceinline__ void store_release(int* to, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

/// red.add.v4.f32: adds to four numbers, 16 bytes, without waiting; four instructions on GPUs before sm_90.
__device__ __forceinline__ void red_add_v4(float* to, const float (&x)[4]) {
    const auto address = __cvta_generic_to_global(to);
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + 4 * i), "f"(x[i]) : "memory");
    }
#endif
}

}  // namespace tessera::cuda::ptx
