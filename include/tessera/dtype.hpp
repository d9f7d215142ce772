// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
namespace tessera {

/// Element types. Attention runs on fp32, bf16 and fp16 (fp64 in the reference). int32 and int64 are for cu_seqlens,
/// int8 is for the residual of O.
enum class DType : std::uint8_t { fp64, fp32, fp16, bf16, int32, int64, int8 };

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::fp64:
        case DType::int64: return 8;
        case DType::fp32:
        case DType::int32: return 4;
        case DType::fp16:
        case DType::bf16: return 2;
        case DType::int8: return 1;
    }
    return 0;
}

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::fp64: return "fp64";
        case DType::fp32: return "fp32";
        case DType::fp16: return "fp16";
        case DType::bf16: return "bf16";
        case DType::int32: return "int32";
        case DType::int64: return "int64";
        case DType::int8: return "int8";
    }
    return "?";
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::bf16; }

/// The 16-bit types of storage, bf16 and fp16.
constexpr bool is_16_bit(DType dtype) { return dtype == DType::bf16 || dtype == DType::fp16; }

}  // namespace tessera
#pragma GCC visibility pop
