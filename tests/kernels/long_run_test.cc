// SPDX-License-Identifier: Apache-2.0
#include "long_run.hpp"

#include <gtest/gtest.h>

namespace tessera::long_run_test {
namespace {

constexpr std::time_t kNow = 1'795'867'200;  // 2026-11-28 12:00 UTC

TEST(LongRun, seeds_move_with_the_date_and_are_given_again_by_a_number) {
    EXPECT_EQ(seed_of_run(nullptr, false, kNow), 0U);
    EXPECT_EQ(seed_of_run(nullptr, true, kNow), 20261128U);
    EXPECT_EQ(seed_of_run(nullptr, true, kNow + 86400), 20261129U);
    EXPECT_EQ(seed_of_run("77", true, kNow), 77U);
    EXPECT_EQ(seed_of_run("77", false, kNow), 77U);
    EXPECT_EQ(random_seed(5) - random_seed(3), 2U);
}

}  // namespace
}  // namespace tessera::long_run_test
