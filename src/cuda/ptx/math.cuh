// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that C++ has no exact word for: one function = one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tessera::cuda::ptx {

/// No instruction: the same value, of which the compiler knows nothing.
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

/// No instruction: what is known of memory is read from there again, and not kept in registers.
__device__ __forceinline__ void compiler_memory_barrier() { asm volatile("" ::: "memory"); }

/// threadIdx.x, read again: one read at the beginning would be kept in a register.
__device__ __forceinline__ int reload_thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/// ex2.approx.ftz: 2^x to 2 ulp on the nonfinite-function unit; 2^-inf = 0, NaN stays.
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

/// cvt: two numbers into a word, over what fp16 holds its largest number instead of infinity. In bf16 as pack().
template <class T>
__device__ __forceinline__ std::uint32_t pack_finite(float low, float high) {
    std::uint32_t packed;
    if constexpr (!std::is_same_v<T, __half>) packed = pack<T>(low, high);
    else asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// prmt: four bytes, chosen by four bits of kPlaces each, the lowest byte first. Places 0 to 3 are the bytes of a,
/// places 4 to 7 those of b, and with the fourth bit set it is eight times the highest bit of that byte.
template <std::uint32_t kPlaces>
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b) {
    std::uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(kPlaces));
    return bytes;
}

/// No asm: one half of what pack() made.
template <class T>
__device__ __forceinline__ float unpack(std::uint32_t packed, int half) {
    const auto bits = static_cast<std::uint16_t>(packed >> (16 * half));
    T value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
}

}  // namespace tessera::cuda::ptx
