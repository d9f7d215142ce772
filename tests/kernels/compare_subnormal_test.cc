// SPDX-License-Identifier: Apache-2.0
//
// The judge allows a certain error if numbers in fp16 become subnormal, and no more than that.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "check/tolerances.hpp"
#include "kernels/support.hpp"

namespace tessera::check::compare_subnormal_test {
namespace {

/// Row 1 has no gradient. Row 0 has one so large that dS of row 1, scaled by the same power of two, may be anything up
/// to kSubnormalGradient of it. Does the judge pass `share` times that in each dS of row 1?
bool passes(DType dtype, double share) {
    Attention a(make_problem(1, 2, 40, 1, 1, 32, dtype));
    for (std::int64_t c = 0; c < 32; ++c) {
        a.d_o.set(1e3 * a.d_o.get(0, 0, 0, c), 0, 0, 0, c);
        a.d_o.set(0, 0, 1, 0, c);
    }
    EXPECT_TRUE(a.forward(kernels()[kernels().size() - 2]));
    EXPECT_TRUE(a.backward(kernels()[kernels().size() - 1]));
    EXPECT_TRUE(a.check_backward().pass()) << a.check_backward().describe();
    double largest = 0;  // of P |dO| |V|, a lower bound for dS of row 0
    for (std::int64_t j = 0; j < 40; ++j) {
        double score = 0;
        double size = 0;
        for (std::int64_t c = 0; c < 32; ++c) {
            score += a.q.get(0, 0, 0, c) * a.k.get(0, j, 0, c) / std::sqrt(32.0);
            size += std::abs(a.d_o.get(0, 0, 0, c) * a.v.get(0, j, 0, c));
        }
        largest += std::exp(score - a.lse.get(0, 0, 0)) * size;
    }
    for (std::int64_t c = 0; c < 32; ++c) {
        double keys = 0;
        for (std::int64_t j = 0; j < 40; ++j) keys += std::abs(a.k.get(0, j, 0, c));
        a.dq.set(share * kSubnormalGradient * largest * keys / std::sqrt(32.0), 0, 1, 0, c);
    }
    return a.check_backward().pass();
}

TEST(CompareSubnormal, gradients_of_fp16_may_lose_what_is_small_beside_the_largest_of_the_head) {
    EXPECT_TRUE(passes(DType::fp16, 0.9));
    EXPECT_FALSE(passes(DType::fp16, 8));
    EXPECT_FALSE(passes(DType::bf16, 0.9));
}

}  // namespace
}  // namespace tessera::check::compare_subnormal_test
