// SPDX-License-Identifier: Apache-2.0
//
// An additive bias, as the wgmma kernels read it: by pairs of neighbouring keys, 32 bits, where its layout has them
// (takes_bias_pairs), else element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/tile/params.hpp"

namespace tessera::cuda {

/// The bias of two neighbouring keys, from their 16-bit elements.
template <class T>
__device__ __forceinline__ float2 unpack_bias(std::uint32_t pair) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(pair));
    else return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

/// The bias of a query at key 0. The query is one of the sequence.
__device__ __forceinline__ const char* bias_row(const Bias& bias, int batch, int head, int query) {
    return bias.data + (batch * bias.batch + head * bias.head + query * bias.row) * (bias.fp32 ? 4 : 2);
}
/// The bias of keys `key` and key + 1, 16 bits each, in a row that has them as one aligned word (takes_bias_pairs).
__device__ __forceinline__ std::uint32_t bias_pair(const char* row, int key) {
    return __ldg(reinterpret_cast<const std::uint32_t*>(row + 2 * std::int64_t{key}));
}
/// Reads that pair in any other layout of 16-bit elements.
__device__ __forceinline__ std::uint32_t bias_pair_of_elements(const Bias& bias, const char* row, int key,
                                                               int last_key) {
    const auto* elements = reinterpret_cast<const std::uint16_t*>(row);
    const std::uint32_t first = __ldg(elements + min(key, last_key) * bias.column);
    const std::uint32_t second = __ldg(elements + min(key + 1, last_key) * bias.column);
    return first | second << 16;
}

/// One element of a row, of any dtype and layout.
template <class T>
__device__ __forceinline__ float bias_element(const Bias& bias, const char* row, int key) {
    // Volatile, or ptxas loads more of them at once than there are registers for.
    const std::int64_t index = key * bias.column;
    if (bias.fp32) return reinterpret_cast<const volatile float*>(row)[index];
    return unpack_bias<T>(reinterpret_cast<const volatile std::uint16_t*>(row)[index]).x;
}

}  // namespace tessera::cuda
