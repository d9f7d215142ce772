// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that C++ has no exact expression for: one function = one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tessera::cuda::ptx {

/// No instruction: returns the value, and hides from the compiler what it is.
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
__device__ __forceinline__ const char* opaque(const char* value) {
    asm volatile("" : "+l"(value));
    return value;
}
__device__ __forceinline__ std::int64_t opaque(std::int64_t value) {
    asm volatile("" : "+l"(value));
    return value;
}

/// No instruction: values in memory are read again, not kept in registers.
__device__ __forceinline__ void compiler_memory_barrier() { asm volatile("" ::: "memory"); }

/// %tid.x, read again: the compiler would keep threadIdx.x in a register.
__device__ __forceinline__ int reload_thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/// ex2.approx.ftz: 2^x to 2 ulp, on the special function unit; 2^-inf = 0, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// rcp.approx.ftz: 1 / x to 1 ulp; infinite for 0 and subnormal x.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// lg2.approx.ftz: log2(x), 2^-22 off at most around 1, to 2 ulp elsewhere; -inf for 0 and subnormal x.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// cvt.rn.{bf16x2,f16x2}.f32: two numbers rounded to 16 bits each, `low` in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t packed;
    if constexpr (std::is_same_v<T, __half>) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// cvt.rn.satfinite: as pack(), but numbers beyond fp16 become its largest number, not infinity. In bf16 it is pack().
template <class T>
__device__ __forceinline__ std::uint32_t pack_finite(float low, float high) {
    std::uint32_t packed;
    if constexpr (!std::is_same_v<T, __half>) packed = pack<T>(low, high);
    else asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// prmt: four bytes, each selected by four bits of kSelector, the lowest byte first. 0 to 3 select the bytes of a, 4 to
/// 7 those of b. With the fourth bit set, the byte's sign bit fills the result's byte.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b) {
    std::uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(kSelector));
    return bytes;
}

/// No asm: one half of a word that pack() made.
template <class T>
__device__ __forceinline__ float unpack(std::uint32_t packed, int half) {
    const auto bits = static_cast<std::uint16_t>(packed >> (16 * half));
    T value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
}

}  // namespace tessera::cuda::ptx
