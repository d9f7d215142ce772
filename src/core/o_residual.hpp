// SPDX-License-Identifier: Apache-2.0
//
// The residual of O: what rounding to 16 bits took off an element, in one signed byte (docs/numerics.md, "The residual
// of O"). It counts in 256ths of the last place of O, away from zero: r > 0 where abs(O) was rounded down.
#pragma once

#include <bit>
#include <cstdint>

#include "tessera/dtype.hpp"
#include "tessera/mask.hpp"

namespace tessera {
namespace residual_detail {

inline constexpr std::int32_t kExponent = 0x7F800000;
inline constexpr std::int32_t kSign = static_cast<std::int32_t>(0x80000000);
inline constexpr float kRoundToInteger = 0x1.8p23F;  // adding it leaves an integer in the lowest bits

/// Exponent field of 2^n.
constexpr std::int32_t field(int n) { return (n + 127) << 23; }

/// The exponent field, in fp32, of a number that fp16 can hold. Subnormal numbers of fp16 get the field of 2^-14, its
/// smallest normal number, because their last bit has the same value.
TESSERA_HOST_DEVICE constexpr std::int32_t exponent_fp16(std::int32_t bits) {
    const std::int32_t exponent = bits & kExponent;
    return exponent > field(-14) ? exponent : field(-14);
}

}  // namespace residual_detail

/// The residual of x, which is `rounded` in bf16 or fp16. It is meaningless when `rounded` is not finite.
template <DType kType>
TESSERA_HOST_DEVICE constexpr std::int32_t residual_of(float x, float rounded) {
    using namespace residual_detail;
    static_assert(is_16_bit(kType));
    const auto bits = std::bit_cast<std::int32_t>(rounded);
    std::int32_t rest = 0;
    if constexpr (kType == DType::bf16) {
        // Both are fp32 numbers of one sign: the difference of their bits counts last places of fp32, 2^16 of them in
        // one of bf16, also across a power of two and among subnormal numbers.
        rest = (std::bit_cast<std::int32_t>(x) - bits + 128) >> 8;
    } else {
        constexpr std::uint32_t kTwice = 2 * 127 + 18;  // field(a) + field(b) = field(a + b) + 127: 2^(18 - exponent)
        const auto field = (kTwice << 23) - static_cast<std::uint32_t>(exponent_fp16(bits));
        const auto places = std::bit_cast<float>(field | static_cast<std::uint32_t>(bits & kSign));
        rest = std::bit_cast<std::int32_t>((x - rounded) * places + kRoundToInteger) -
               std::bit_cast<std::int32_t>(kRoundToInteger);
    }
    return rest < 127 ? rest : 127;
}

/// O + residual; O where that is not finite.
template <DType kType>
TESSERA_HOST_DEVICE constexpr float with_residual(float rounded, std::int32_t rest) {
    using namespace residual_detail;
    static_assert(is_16_bit(kType));
    const auto bits = std::bit_cast<std::int32_t>(rounded);
    if ((bits & kExponent) == kExponent) return rounded;
    if constexpr (kType == DType::bf16) return std::bit_cast<float>(bits + rest * 256);
    else
        return rounded +
               static_cast<float>(rest) * std::bit_cast<float>((exponent_fp16(bits) - (18 << 23)) | (bits & kSign));
}

}  // namespace tessera
