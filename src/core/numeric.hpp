// SPDX-License-Identifier: Apache-2.0
//
// Exact conversions between the storage types and fp32/fp64. Rounding is to nearest, ties to even, once: fp64 goes to
// bf16 and fp16 directly, not by way of fp32. NaN stays NaN, overflow becomes infinity.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "tessera/dtype.hpp"

namespace tessera {

/// Storage types: the bits of one element. They are distinct types, so that templates can distinguish them.
struct Bf16 {
    std::uint16_t bits = 0;
};
struct Fp16 {
    std::uint16_t bits = 0;
};

/// Calls `f` with a value of the storage type of a floating dtype: visit_floating(d, [&](auto zero) { using T = ... }).
template <class F>
decltype(auto) visit_floating(DType dtype, F&& f) {
    switch (dtype) {
        case DType::fp64: return f(double{});
        case DType::fp16: return f(Fp16{});
        case DType::bf16: return f(Bf16{});
        default: return f(float{});
    }
}

/// Rounds a finite or infinite double to a format of `mantissa_bits` explicit bits and `exponent_bits`; NaN to quiet
/// NaN.
template <int kMantissaBits, int kExponentBits>
std::uint16_t round_to_16_bits(double value) {
    constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    constexpr std::uint64_t kInfinity = ((std::uint64_t{1} << kExponentBits) - 1) << kMantissaBits;
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 63) << 15);
    const std::uint64_t magnitude = bits & ~(std::uint64_t{1} << 63);
    if (magnitude > (std::uint64_t{0x7FF} << 52)) {
        return static_cast<std::uint16_t>(sign | kInfinity | (std::uint64_t{1} << (kMantissaBits - 1)));
    }
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (exponent > kBias) return static_cast<std::uint16_t>(sign | kInfinity);
    const std::uint64_t significand = (magnitude & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
    const int subnormal_shift = exponent < 1 - kBias ? 1 - kBias - exponent : 0;
    const int dropped = 52 - kMantissaBits + subnormal_shift;
    if (dropped > 54 || magnitude == 0) return sign;
    const std::uint64_t half = std::uint64_t{1} << (dropped - 1);
    std::uint64_t kept = significand >> dropped;
    const std::uint64_t rest = significand & ((half << 1) - 1);
    if (rest > half || (rest == half && (kept & 1))) ++kept;
    // A normal significand carries its hidden bit into the exponent field; a carry out of it rounds up to the next
    // power of two, and from the largest finite value to infinity.
    const std::uint64_t field =
        subnormal_shift > 0 ? 0 : static_cast<std::uint64_t>(exponent + kBias - 1) << kMantissaBits;
    return static_cast<std::uint16_t>(sign | (field + kept));
}

inline float to_float(Bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(Fp16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t exponent = (value.bits >> 10) & 0x1Fu;
    const std::uint32_t mantissa = value.bits & 0x3FFu;
    if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline float to_float(float value) { return value; }
inline double to_double(double value) { return value; }
inline double to_double(float value) { return value; }
inline double to_double(Bf16 value) { return to_float(value); }
inline double to_double(Fp16 value) { return to_float(value); }

template <class T>
T from_double(double value);
template <>
inline double from_double<double>(double value) {
    return value;
}
template <>
inline float from_double<float>(double value) {
    return static_cast<float>(value);
}
template <>
inline Bf16 from_double<Bf16>(double value) {
    return {round_to_16_bits<7, 8>(value)};
}
template <>
inline Fp16 from_double<Fp16>(double value) {
    return {round_to_16_bits<10, 5>(value)};
}

/// Reads (writes) one element of a floating tensor as fp64.
inline double load_as_double(const void* element, DType dtype) {
    return visit_floating(dtype, [&](auto zero) { return to_double(*static_cast<const decltype(zero)*>(element)); });
}
inline void store_from_double(void* element, DType dtype, double value) {
    visit_floating(dtype,
                   [&](auto zero) { *static_cast<decltype(zero)*>(element) = from_double<decltype(zero)>(value); });
}

}  // namespace tessera
