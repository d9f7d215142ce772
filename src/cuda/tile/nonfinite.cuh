// SPDX-License-Identifier: Apache-2.0
//
// NaN and infinities in words of two 16-bit floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tessera::cuda {

/// Not 0 where one of the two numbers in a word is NaN or infinite: a full exponent carries into the sign bit.
template <class T>
__device__ __forceinline__ std::uint32_t nonfinite(std::uint32_t pair) {
    constexpr std::uint32_t kExponents = std::is_same_v<T, __half> ? 0x7C007C00 : 0x7F807F80;
    constexpr std::uint32_t kOnes = std::is_same_v<T, __half> ? 0x04000400 : 0x00800080;
    return ((pair & kExponents) + kOnes) & 0x80008000;
}
template <class T>
__device__ __forceinline__ std::uint32_t nonfinite(const uint4& c) {
    return nonfinite<T>(c.x) | nonfinite<T>(c.y) | nonfinite<T>(c.z) | nonfinite<T>(c.w);
}

/// The sum of 0 times each number: NaN if one is NaN or infinite, else 0. One instruction a word.
template <class T>
__device__ __forceinline__ auto zero_or_nan(const uint4& c) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const std::uint32_t words[4] = {c.x, c.y, c.z, c.w};
    const Pair zero{T(0.0F), T(0.0F)};
    Pair sum = zero;
#pragma unroll
    for (const std::uint32_t& word : words) sum = __hfma2(reinterpret_cast<const Pair&>(word), zero, sum);
    return sum;
}

}  // namespace tessera::cuda
