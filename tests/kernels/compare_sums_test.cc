// SPDX-License-Identifier: Apache-2.0
//
// The judge allows a certain error of fp32 sums whose terms cancel, and no more than that.
#include <gtest/gtest.h>

#include <cmath>

#include "check/compare_tensor.hpp"
#include "check/tolerances.hpp"
#include "kernels/support.hpp"

namespace tessera::check::compare_sums_test {
namespace {

/// One key, whose score is 0, the sum of terms of +-`size` / 2. May LSE be off by `error`?
bool lse_passes(double size, double error) {
    Attention a(make_problem(1, 1, 1, 1, 1, 2, DType::fp32));
    a.problem.scale = 1;
    for (std::int64_t c = 0; c < 2; ++c) {
        a.q.set(size / 2, 0, 0, 0, c);
        a.k.set(c == 0 ? 1 : -1, 0, 0, 0, c);
    }
    EXPECT_TRUE(a.forward(kernels()[kernels().size() - 2]));  // the reference
    EXPECT_TRUE(a.check_forward().pass());
    a.lse.set(error, 0, 0, 0);
    return a.check_forward().pass();
}

/// In a row with one large weight LSE is that score, and has its error.
TEST(CompareSums, lse_is_granted_the_error_of_a_score_where_that_is_more_than_its_limit) {
    const double score = kScoreRoundings * 0x1p-24;  // of the size
    EXPECT_LT(score * kOrdinaryLse, kLseAbsolute);
    EXPECT_TRUE(lse_passes(0.9 * kOrdinaryLse, 0.9 * kLseAbsolute));
    EXPECT_FALSE(lse_passes(0.9 * kOrdinaryLse, 1.1 * kLseAbsolute));
    for (const double size : {12.0, 15.9, 100.0}) {
        EXPECT_TRUE(lse_passes(size, 0.9 * (kLseAbsolute + score * size)));
        EXPECT_FALSE(lse_passes(size, 1.1 * (kLseAbsolute + score * size)));
    }
}

/// 64 rows whose terms, of size 1, cancel to 0, and which are all wrong by `error` 2^-24.
bool gradient_passes(bool has_copies, double error) {
    Tensor got(DType::fp32, {1, 64, 1, 16});
    for (std::int64_t i = 0; i < 64; ++i) {
        for (std::int64_t c = 0; c < 16; ++c) got.set(error * 0x1p-24, 0, i, 0, c);
    }
    TensorGold gold("dq", got.view, DType::fp32);
    gold.has_copies = has_copies;
    for (double& size : gold.magnitude.data) size = 1;
    return compare_tensor(gold, got.view, DType::fp32, Role::gradient).pass;
}

TEST(CompareSums, what_cancels_in_rows_that_are_copies_is_one_error) {
    EXPECT_TRUE(gradient_passes(false, 0.9 * kCancelled));
    EXPECT_FALSE(gradient_passes(false, 1.6 * kCancelled));
    EXPECT_TRUE(gradient_passes(true, 0.9 * kCancelled * (1 + kFewElements)));
    EXPECT_FALSE(gradient_passes(true, 1.1 * kCancelled * (1 + kFewElements)));
}

}  // namespace
}  // namespace tessera::check::compare_sums_test
