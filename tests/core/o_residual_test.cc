// SPDX-License-Identifier: Apache-2.0
//
// The residual of O, one byte an element: compares O + residual with the number that was rounded.
#include "core/o_residual.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/case.hpp"
#include "core/numeric.hpp"

namespace tessera::test::o_residual_test {
namespace {

template <DType kType>
float rounded(float x) {
    if constexpr (kType == DType::bf16) return to_float(from_double<Bf16>(x));
    else return to_float(from_double<Fp16>(x));
}

template <DType kType>
float from_bits(std::uint32_t bits) {
    if constexpr (kType == DType::bf16) return to_float(Bf16{static_cast<std::uint16_t>(bits)});
    else return to_float(Fp16{static_cast<std::uint16_t>(bits)});
}

template <DType kType>
float restored(float x) {
    const std::int32_t rest = residual_of<kType>(x, rounded<kType>(x));
    EXPECT_TRUE(rest >= -128 && rest <= 127) << x;
    return with_residual<kType>(rounded<kType>(x), rest);
}

/// The distance from abs(x) to the next number in 16 bits.
template <DType kType>
double ulp_of(float x) {
    constexpr int kDigits = kType == DType::bf16 ? 7 : 10;
    constexpr int kLeast = kType == DType::bf16 ? -126 : -14;
    return std::ldexp(1.0, std::max(std::ilogb(x), kLeast) - kDigits);
}

/// The largest error: half a 256th of the last place, or a whole one if 128 of them are cut to 127.
template <DType kType>
void expect_restored(float x) {
    const float o = rounded<kType>(x);
    if (!std::isfinite(o)) return;
    const double ulp = ulp_of<kType>(o);
    const double error = std::abs(static_cast<double>(restored<kType>(x)) - x);
    const bool at_the_end = std::abs(static_cast<double>(o) - x) > ulp * 127.49 / 256;
    EXPECT_LE(error, ulp / 256 * (at_the_end ? 1.0 : 0.5)) << std::hexfloat << x << " in " << name_of(kType);
}

template <DType kType>
class Numbers {
 public:
    static void around_every_number() {
        std::mt19937 draw(1);
        for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
            const float o = from_bits<kType>(bits);
            if (!std::isfinite(o)) continue;
            EXPECT_EQ(residual_of<kType>(o, o), 0) << o;
            EXPECT_EQ(std::bit_cast<std::uint32_t>(with_residual<kType>(o, 0)), std::bit_cast<std::uint32_t>(o));
            const double ulp = o == 0 ? ulp_of<kType>(std::numeric_limits<float>::min()) : ulp_of<kType>(o);
            for (int i = 0; i < 16; ++i) {
                const double share = static_cast<double>(draw()) / 0x1p32 - 0.5;
                expect_restored<kType>(static_cast<float>(o + share * ulp));
            }
            for (const double share : {-0.5, -0.25, 0.25, 0.5}) {
                expect_restored<kType>(static_cast<float>(o + share * ulp));
            }
        }
    }
};

TEST(ResidualOfO, brings_back_what_rounding_took_off) {
    Numbers<DType::bf16>::around_every_number();
    Numbers<DType::fp16>::around_every_number();
}

TEST(ResidualOfO, counts_away_from_zero) {
    EXPECT_EQ(residual_of<DType::bf16>(1 + 0x1p-9F, 1), 64);  // a quarter of a place
    EXPECT_EQ(residual_of<DType::bf16>(-1 - 0x1p-9F, -1), 64);
    EXPECT_EQ(residual_of<DType::bf16>(1.5F - 0x1p-9F, 1.5F), -64);
    EXPECT_EQ(residual_of<DType::fp16>(1 + 0x1p-12F, 1), 64);
    EXPECT_EQ(residual_of<DType::fp16>(-1 - 0x1p-12F, -1), 64);
    EXPECT_EQ(residual_of<DType::fp16>(-1.5F + 0x1p-12F, -1.5F), -64);
}

/// Below a power of two the numbers of bf16 lie closer, and so do its 256ths.
TEST(ResidualOfO, crosses_powers_of_two) {
    expect_restored<DType::bf16>(1 - 0x1p-10F);
    EXPECT_EQ(restored<DType::bf16>(1 - 0x1p-10F), 1 - 0x1p-10F);
    EXPECT_EQ(restored<DType::fp16>(1 - 0x1p-13F), 1 - 0x1p-13F);
    EXPECT_EQ(restored<DType::fp16>(0x1p-14F - 0x1p-26F), 0x1p-14F - 0x1p-26F);
}

TEST(ResidualOfO, of_halves_is_one_256th_short) {
    EXPECT_EQ(residual_of<DType::bf16>(1 + 0x1p-8F, 1), 127);
    EXPECT_EQ(residual_of<DType::fp16>(1 + 0x1p-11F, 1), 127);
}

template <DType kType>
void expect_special_values_kept() {
    constexpr float kLarge = std::numeric_limits<float>::infinity();
    for (const int rest : {-128, -1, 0, 127}) {  // the byte means nothing there
        EXPECT_EQ(with_residual<kType>(kLarge, rest), kLarge);
        EXPECT_EQ(with_residual<kType>(-kLarge, rest), -kLarge);
        EXPECT_TRUE(std::isnan(with_residual<kType>(std::numeric_limits<float>::quiet_NaN(), rest)));
    }
    EXPECT_EQ(residual_of<kType>(0.0F, 0.0F), 0);
    EXPECT_TRUE(std::signbit(with_residual<kType>(-0.0F, residual_of<kType>(-0.0F, -0.0F))));
    const float least = kType == DType::bf16 ? 0x1p-133F : 0x1p-24F;  // subnormal
    EXPECT_EQ(restored<kType>(least / 4), least / 4);                 // rounded to 0
    EXPECT_EQ(restored<kType>(-1.25F * least), -1.25F * least);
}

TEST(ResidualOfO, leaves_zeros_infinities_and_nan_alone) {
    expect_special_values_kept<DType::bf16>();
    expect_special_values_kept<DType::fp16>();
    const float above = 65519;  // the largest that fp16 rounds to a number
    EXPECT_EQ(rounded<DType::fp16>(above), 65504.0F);
    EXPECT_NEAR(restored<DType::fp16>(above), above, 0.125);
}

/// A call may give o_residual only for 16-bit problems, as int8 in the shape of o, to kernels that write it.
TEST(ResidualOfO, is_refused_where_it_does_not_belong) {
    const auto code_of = [](DType dtype, DType of_residual, std::int64_t columns, Pass pass) {
        Problem p = Problem::dense(1, 5, 2, 8, dtype);
        Case c(p);
        Tensor rest(of_residual, {1, 5, 2, columns});
        ForwardArgs forward_args = c.forward_args();
        BackwardArgs backward_args = c.backward_args();
        forward_args.o_residual = backward_args.o_residual = rest;
        try {
            const Plan how = plan(p, {.pass = pass});
            EXPECT_FALSE(how.o_residual);  // no kernel of the CPU
            if (pass == Pass::forward) forward(how, forward_args, Workspace(how));
            else backward(how, backward_args, Workspace(how));
        } catch (const Error& e) {
            EXPECT_EQ(e.argument(), "o_residual") << e.what();
            return e.code();
        }
        return ErrorCode::ok;
    };
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        EXPECT_EQ(code_of(DType::fp32, DType::int8, 8, pass), ErrorCode::invalid_argument);
        EXPECT_EQ(code_of(DType::bf16, DType::int32, 8, pass), ErrorCode::invalid_argument);
        EXPECT_EQ(code_of(DType::bf16, DType::int8, 9, pass), ErrorCode::invalid_argument);
    }
    EXPECT_EQ(code_of(DType::fp16, DType::int8, 8, Pass::forward), ErrorCode::unsupported);
    EXPECT_EQ(code_of(DType::fp16, DType::int8, 8, Pass::backward), ErrorCode::ok);  // not checked
}

}  // namespace
}  // namespace tessera::test::o_residual_test
