// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic of single instructions: their error, and their results for special values.
#include <cmath>
#include <limits>

#include "core/numeric.hpp"
#include "cuda/on_device.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda::test {
namespace {

__global__ void powers_of_2(const float* x, float* y, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 256) y[i] = ptx::exp2_approx(x[i]);
}

template <class T>
__global__ void round_pairs(const float* x, std::uint32_t* packed, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 256) packed[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
}

std::vector<float> exp2_of(const std::vector<float>& x) {
    const Mirror<float> in(x);
    Mirror<float> out(x.size());
    run_block(powers_of_2, 256, 0, static_cast<const float*>(in.device()), out.device(), static_cast<int>(x.size()));
    return out.fetch();
}

class Math : public OnHopper {};

TEST_F(Math, exp2_is_within_2_ulp_where_the_result_is_normal) {
    const check::Random random(20261121);
    std::vector<float> x;
    for (std::uint64_t i = 0; i < 200'000; ++i) {
        const double u = static_cast<double>(random.bits(i) % (1ULL << 32)) * 0x1p-32;
        x.push_back(static_cast<float>(i % 2 == 0 ? -126 * u : std::exp2(-24 * u) * (i % 4 == 1 ? -1 : 1)));
    }
    const std::vector<float> y = exp2_of(x);
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double right = std::exp2(static_cast<double>(x[i]));
        const double ulp = std::exp2(std::floor(std::log2(right)) - 23);
        worst = std::max(worst, std::abs(static_cast<double>(y[i]) - right) / ulp);
    }
    EXPECT_LE(worst, 2.0);
    RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_F(Math, exp2_of_no_positive_number_is_over_1) {
    std::vector<float> x{0.0F, -0.0F};
    for (float e = -1e-30F; e > -1e-3F; e *= 2) x.push_back(e);
    for (const float y : exp2_of(x)) EXPECT_LE(y, 1.0F);
}

TEST_F(Math, exp2_of_special_values) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const std::vector<float> y = exp2_of({0.0F, -kInfinity, kInfinity, std::nanf(""), -3.0F, 10.0F, -200.0F, 200.0F,
                                          -std::numeric_limits<float>::max(), -1e-40F});
    EXPECT_EQ(y[0], 1.0F);
    EXPECT_EQ(y[1], 0.0F);
    EXPECT_EQ(y[2], kInfinity);
    EXPECT_TRUE(std::isnan(y[3]));
    EXPECT_EQ(y[4], 0.125F);
    EXPECT_EQ(y[5], 1024.0F);
    EXPECT_EQ(y[6], 0.0F);
    EXPECT_EQ(y[7], kInfinity);
    EXPECT_EQ(y[8], 0.0F);
    EXPECT_EQ(y[9], 1.0F);
}

TEST_F(Math, pack_rounds_to_nearest_even_with_the_first_in_the_lower_half) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    std::vector<float> x{0.0F,     -0.0F,     1.0F,    -1.0F,     kInfinity, -kInfinity, 65504.0F, 65519.9F,
                         65520.0F, -65536.0F, 3.4e38F, -3.39e38F, 1e-8F,     6e-8F,      2.98e-8F, 1e-40F,
                         1.0F / 3, 2049.0F,   2051.0F, 257.0F,    259.0F,    1e-38F};
    const check::Random random(7);
    for (std::uint64_t i = 0; x.size() < 20'000; ++i) {
        const auto scale = static_cast<int>(random.bits(3 * i) % 60) - 30;
        x.push_back(std::ldexp(static_cast<float>(random.bits(3 * i + 1) % 20001) / 1e4F - 1.0F, scale));
    }
    for_both_types([&](auto t) {
        using T = decltype(t);
        const DType dtype = std::is_same_v<T, __half> ? DType::fp16 : DType::bf16;
        const Mirror<float> in(x);
        Mirror<std::uint32_t> out(x.size() / 2);
        run_block(round_pairs<T>, 256, 0, static_cast<const float*>(in.device()), out.device(),
                  static_cast<int>(x.size() / 2));
        out.fetch();
        for (std::size_t i = 0; i < x.size(); ++i) {
            std::uint16_t expected = 0;
            store_from_double(&expected, dtype, static_cast<double>(x[i]));
            ASSERT_EQ(out.host[i / 2] >> (16 * (i % 2)) & 0xFFFF, expected) << x[i];
        }
    });
}

TEST_F(Math, pack_keeps_nan) {
    for_both_types([](auto t) {
        using T = decltype(t);
        const Mirror<float> in(std::vector<float>{std::nanf(""), 1.0F});
        Mirror<std::uint32_t> out(1);
        run_block(round_pairs<T>, 32, 0, static_cast<const float*>(in.device()), out.device(), 1);
        const DType dtype = std::is_same_v<T, __half> ? DType::fp16 : DType::bf16;
        const auto half = static_cast<std::uint16_t>(out.fetch()[0] & 0xFFFF);
        EXPECT_TRUE(std::isnan(load_as_double(&half, dtype)));
    });
}

}  // namespace
}  // namespace tessera::cuda::test
