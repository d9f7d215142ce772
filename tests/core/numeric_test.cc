// SPDX-License-Identifier: Apache-2.0
#include "core/numeric.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tessera::numeric_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

/// The value of a 16-bit pattern from the definition of the format, in exact fp64 arithmetic.
double value_of(std::uint16_t pattern, int mantissa_bits, int exponent_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (pattern >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = pattern & ((1 << mantissa_bits) - 1);
    const double sign = pattern & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * kInf;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

struct Bf16Format {
    using Type = Bf16;
    static constexpr int kMantissaBits = 7;
    static constexpr int kExponentBits = 8;
};
struct Fp16Format {
    using Type = Fp16;
    static constexpr int kMantissaBits = 10;
    static constexpr int kExponentBits = 5;
};

template <class Format>
class Numeric16 : public ::testing::Test {
 public:
    using Type = typename Format::Type;
    static constexpr std::uint16_t kInfinityBits = ((1u << Format::kExponentBits) - 1) << Format::kMantissaBits;

    static double exact(std::uint16_t pattern) {
        return value_of(pattern, Format::kMantissaBits, Format::kExponentBits);
    }

    /// The value after the largest finite one, as if the exponent went on: rounding to it is overflow.
    static double value_or_next_power(std::uint16_t pattern) {
        return pattern == kInfinityBits ? std::ldexp(1.0, 1 << (Format::kExponentBits - 1)) : exact(pattern);
    }

    /// Nearest pattern, ties to the even one, by search over the positive patterns; no bit arithmetic on the value.
    static std::uint16_t nearest(double value) {
        const double magnitude = std::fabs(value);
        const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        if (magnitude >= value_or_next_power(kInfinityBits)) return sign | kInfinityBits;
        std::uint16_t low = 0;
        for (int step = 1 << 14; step > 0; step /= 2) {
            const auto next = static_cast<std::uint16_t>(low + step);
            if (next < kInfinityBits && exact(next) <= magnitude) low = next;
        }
        const std::uint16_t high = low + 1;
        const double middle = (value_or_next_power(low) + value_or_next_power(high)) / 2;  // exact: few bits each
        const bool up = magnitude > middle || (magnitude == middle && high % 2 == 0);
        return sign | (up ? high : low);
    }

    static void expect_rounded(double value) {
        ASSERT_EQ(from_double<Type>(value).bits, nearest(value)) << std::hexfloat << value;
    }
};
using Formats = ::testing::Types<Bf16Format, Fp16Format>;
TYPED_TEST_SUITE(Numeric16, Formats);

TYPED_TEST(Numeric16, every_pattern_has_its_value) {
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        const typename TestFixture::Type x{static_cast<std::uint16_t>(pattern)};
        const double expected = TestFixture::exact(x.bits);
        if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(to_float(x)) && std::isnan(to_double(x))) << pattern;
        } else {
            ASSERT_EQ(static_cast<double>(to_float(x)), expected) << pattern;
            ASSERT_EQ(to_double(x), expected) << pattern;
            ASSERT_EQ(std::signbit(to_double(x)), (pattern & 0x8000) != 0) << pattern;
        }
    }
}

TYPED_TEST(Numeric16, every_pattern_round_trips) {
    using T = typename TestFixture::Type;
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        const T x{static_cast<std::uint16_t>(pattern)};
        const T back = from_double<T>(to_double(x));
        if (std::isnan(to_double(x))) {
            ASSERT_TRUE(std::isnan(to_double(back))) << pattern;
            ASSERT_EQ(back.bits & 0x8000, x.bits & 0x8000) << pattern;
        } else {
            ASSERT_EQ(back.bits, x.bits) << pattern;
        }
    }
}

TYPED_TEST(Numeric16, rounds_to_nearest_even_around_every_pattern) {
    for (std::uint16_t pattern = 0; pattern < TestFixture::kInfinityBits; ++pattern) {
        const double x = TestFixture::exact(pattern);
        const double middle = (x + TestFixture::value_or_next_power(pattern + 1)) / 2;
        for (const double at : {x, middle}) {
            for (const double value : {at, std::nextafter(at, kInf), std::nextafter(at, -kInf)}) {
                TestFixture::expect_rounded(value);
                TestFixture::expect_rounded(-value);
            }
        }
    }
}

TYPED_TEST(Numeric16, rounds_random_doubles_of_any_size) {
    std::mt19937_64 random(7);
    for (int n = 0; n < 200000; ++n) {
        const double any = std::bit_cast<double>(random());
        if (!std::isnan(any)) TestFixture::expect_rounded(any);
        const double likely =
            std::ldexp(std::uniform_real_distribution<double>(-1, 1)(random), static_cast<int>(random() % 64) - 40);
        TestFixture::expect_rounded(likely);
    }
}

TYPED_TEST(Numeric16, rounds_once_and_not_by_way_of_fp32) {
    // Slightly over the middle of two neighbours: rounded to fp32 first, it would become the middle, then the even one.
    constexpr double kStep = std::bit_cast<double>(std::uint64_t(1023 - TypeParam::kMantissaBits) << 52);  // at 1
    const double over = 1 + kStep / 2 + 0x1p-40;
    const double under = 1 + 1.5 * kStep - 0x1p-40;
    EXPECT_EQ(to_double(from_double<typename TypeParam::Type>(over)), 1 + kStep);
    EXPECT_EQ(to_double(from_double<typename TypeParam::Type>(under)), 1 + kStep);
    EXPECT_EQ(to_double(from_double<typename TypeParam::Type>(static_cast<float>(over))), 1.0);
    EXPECT_EQ(to_double(from_double<typename TypeParam::Type>(static_cast<float>(under))), 1 + 2 * kStep);
}

TYPED_TEST(Numeric16, overflow_and_special_values) {
    using T = typename TestFixture::Type;
    const std::uint16_t infinity = TestFixture::kInfinityBits;
    const double largest = TestFixture::exact(static_cast<std::uint16_t>(infinity - 1));
    const double limit = (largest + TestFixture::value_or_next_power(infinity)) / 2;
    EXPECT_EQ(from_double<T>(largest).bits, infinity - 1);
    EXPECT_EQ(from_double<T>(std::nextafter(limit, 0)).bits, infinity - 1);
    EXPECT_EQ(from_double<T>(limit).bits, infinity);
    EXPECT_EQ(from_double<T>(-limit).bits, infinity | 0x8000);
    EXPECT_EQ(from_double<T>(kInf).bits, infinity);
    EXPECT_EQ(from_double<T>(-kInf).bits, infinity | 0x8000);
    EXPECT_EQ(from_double<T>(std::numeric_limits<double>::max()).bits, infinity);
    EXPECT_EQ(from_double<T>(std::numeric_limits<double>::denorm_min()).bits, 0);
    EXPECT_EQ(from_double<T>(-0.0).bits, 0x8000);
    // A signalling NaN whose payload is in the low bits only must not become infinity.
    EXPECT_TRUE(std::isnan(to_double(from_double<T>(std::bit_cast<double>(std::uint64_t{0x7FF0000000000001})))));
    EXPECT_TRUE(std::isnan(to_double(from_double<T>(std::nan("")))));
}

TEST(Numeric, known_patterns) {
    EXPECT_EQ(from_double<Fp16>(1.0).bits, 0x3C00);
    EXPECT_EQ(from_double<Fp16>(65504.0).bits, 0x7BFF);
    EXPECT_EQ(from_double<Fp16>(65520.0).bits, 0x7C00);
    EXPECT_EQ(from_double<Fp16>(0x1p-24).bits, 0x0001);
    EXPECT_EQ(from_double<Fp16>(0x1p-25).bits, 0x0000);
    EXPECT_EQ(from_double<Fp16>(0x1.8p-25).bits, 0x0001);
    EXPECT_EQ(from_double<Bf16>(1.0).bits, 0x3F80);
    EXPECT_EQ(from_double<Bf16>(3.14159265).bits, 0x4049);
    EXPECT_EQ(from_double<Bf16>(0x1p-133).bits, 0x0001);
}

TEST(Numeric, loads_and_stores_every_floating_dtype) {
    for (const DType dtype : {DType::fp64, DType::fp32, DType::fp16, DType::bf16}) {
        std::array<std::byte, 16> memory{};
        store_from_double(memory.data() + 8, dtype, -1.5);
        EXPECT_EQ(load_as_double(memory.data() + 8, dtype), -1.5) << name_of(dtype);
        EXPECT_EQ(load_as_double(memory.data(), dtype), 0.0);
        const auto written = static_cast<std::size_t>(size_of(dtype));
        for (std::size_t i = 8 + written; i < memory.size(); ++i) EXPECT_EQ(memory[i], std::byte{0}) << name_of(dtype);
    }
    EXPECT_EQ(from_double<float>(1 + 0x1p-24), 1.0F);
    EXPECT_EQ(from_double<float>(1 + 0x1.8p-24), 1 + 0x1p-23F);
    EXPECT_EQ(from_double<double>(0.1), 0.1);
}

}  // namespace
}  // namespace tessera::numeric_test
