// SPDX-License-Identifier: Apache-2.0
//
// The rule of the fp16 scales of dS (cuda/backward/host/fp16_scale.hpp). No GPU is needed.
#include <gtest/gtest.h>

#include "cuda/backward/host/fp16_scale.hpp"

namespace tessera::check::fp16_scale_test {
namespace {

using cuda::Fp16DsScaleOfRows;
using cuda::Fp16DsScaleOfSplit;

/// A bound in [2^e, 2^(e + 1)) times the scale is in [2^14, 2^15) or, with its margin, [2^15, 2^16): fp16 holds it.
TEST(Fp16Scale, a_bound_becomes_a_number_that_fp16_holds) {
    for (int e = -46; e <= 74; ++e) EXPECT_EQ(Fp16DsScaleOfRows::exponent(127 + e) + e, 14) << "bound 2^" << e;
    for (int e = -85; e <= 115; ++e) EXPECT_EQ(Fp16DsScaleOfSplit::exponent(127 + e) + e, 15) << "bound 2^" << e;
}

TEST(Fp16Scale, exponents_have_limits) {
    EXPECT_EQ(Fp16DsScaleOfRows::exponent(1), 60);
    EXPECT_EQ(Fp16DsScaleOfRows::exponent(254), -60);
    EXPECT_EQ(Fp16DsScaleOfRows::exponent(127, 10), 10) << "an upper limit of the caller";
    EXPECT_EQ(Fp16DsScaleOfSplit::exponent(1), 100);
    EXPECT_EQ(Fp16DsScaleOfSplit::exponent(254), -100);
}

}  // namespace
}  // namespace tessera::check::fp16_scale_test
