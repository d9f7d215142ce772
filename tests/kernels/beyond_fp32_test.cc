// SPDX-License-Identifier: Apache-2.0
//
// The judge on scores beyond the range of fp32, for which docs/numerics.md promises nothing.
#include <gtest/gtest.h>

#include <cmath>

#include "check/compare.hpp"
#include "kernels/support.hpp"

namespace tessera::check::beyond_fp32_test {
namespace {

const TensorReport& of(const Report& report, const std::string& name) {
    for (const TensorReport& t : report.tensors) {
        if (t.name == name) return t;
    }
    ADD_FAILURE() << "no " << name;
    return report.tensors.front();
}

/// The inputs are finite, but the scores of query 3 overflow fp32. Its rows may hold anything; all others must be
/// right.
TEST(BeyondFp32, nothing_is_promised_of_scores_beyond_fp32) {
    const KernelInfo &forward = kernels()[kernels().size() - 2], &backward = kernels()[kernels().size() - 1];
    Attention a(make_problem(1, 20, 24, 1, 1, 8));
    for (std::int64_t c = 0; c < 8; ++c) a.q.set(2e38 * (c % 2 == 0 ? 1 : -1), 0, 3, 0, c);
    for (std::int64_t j = 0; j < 24; ++j) {
        for (std::int64_t c = 0; c < 8; ++c) a.k.set(c % 2 == 0 ? 3 : -3, 0, j, 0, c);
    }
    ASSERT_TRUE(a.forward(forward));
    ASSERT_TRUE(a.backward(backward));
    for (const bool own : {true, false}) {
        const Report report = a.check_forward();
        EXPECT_TRUE(report.pass()) << report.describe();
        EXPECT_EQ(of(report, "o").free, 8);
        EXPECT_EQ(of(report, "o").finite, 19 * 8);
        EXPECT_EQ(of(report, "lse").free, 1);
        const Report gradients = a.check_backward();
        EXPECT_TRUE(gradients.pass()) << gradients.describe();
        EXPECT_EQ(of(gradients, "dq").free, 8);
        EXPECT_EQ(of(gradients, "dk").free, 24 * 8);
        if (own) a.o.set(std::nan(""), 0, 3, 0, 0);
    }
    a.o.set(std::nan(""), 0, 4, 0, 0);
    EXPECT_FALSE(a.check_forward().pass());
}

}  // namespace
}  // namespace tessera::check::beyond_fp32_test
