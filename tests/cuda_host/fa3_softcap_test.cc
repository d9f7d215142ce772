// SPDX-License-Identifier: Apache-2.0
//
// The two formulas of fa3 for the tanh of a softcap (src/cuda/fa3/host/softcap.hpp), evaluated in fp32 as in the
// kernel.
#include "cuda/fa3/host/softcap.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::fa3_softcap_test {
namespace {

using cuda::fa3::fits;
using cuda::fa3::Softcap;
using cuda::fa3::softcap_of;

float capped(const Softcap& cap, float x) {
    if (std::abs(x) >= cap.near) return std::fma(1.0F / (std::exp2(x * cap.exponent) + 1.0F), -cap.twice_cap, cap.cap);
    const float u = x * x;
    float sum = cap.coefficients[3];
    for (int i = 2; i >= 0; --i) sum = std::fma(sum, u, cap.coefficients[i]);
    return x * std::fma(sum, u, 1.0F);
}

TEST(Fa3Softcap, is_right_to_few_roundings_at_every_size_of_score_and_of_both_signs) {
    for (const double softcap : {1e-2, 0.5, 5.0, 50.0, 1e3}) {
        for (const double scale : {1.0, 0.125, 0.0884}) {
            const Softcap cap = softcap_of(softcap, scale);
            ASSERT_TRUE(fits(cap)) << softcap << " " << scale;
            for (double of_cap = 1e-8; of_cap < 1e6; of_cap *= 1.003) {
                for (const double sign : {1.0, -1.0}) {
                    const auto product = static_cast<float>(sign * of_cap * softcap / scale);
                    const double expected = softcap / scale * std::tanh(double{product} * scale / softcap);
                    ASSERT_NEAR(capped(cap, product), expected, 5e-7 * std::abs(expected))
                        << softcap << " " << scale << " " << product;
                }
            }
        }
    }
}

TEST(Fa3Softcap, fits_where_its_numbers_are_normal) {
    EXPECT_TRUE(fits(softcap_of(1e3, 1.0)));
    EXPECT_FALSE(fits(softcap_of(1e30, 1.0)));
    EXPECT_FALSE(fits(softcap_of(1e-30, 1.0)));
}

}  // namespace
}  // namespace tessera::fa3_softcap_test
