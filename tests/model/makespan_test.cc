// SPDX-License-Identifier: Apache-2.0
#include "model/makespan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace tessera::model {
namespace {

TEST(Makespan, by_hand) {
    // Two multiprocessors: 3 and 1 first, then 2 and 4 to who is free: 0 [3, 4], 1 [1, 2]; 4 begins at 3 on both
    // counts.
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{3, 1, 2, 4}, {2}), 7);
    // Longest first: 4, 3, then 2 after the 3, 1 after the 4.
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{4, 3, 2, 1}, {2}), 5);
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{}, {2}), 0);
    // One multiprocessor, two at a time: both go on at half the rate until the short one ends, at 2; then alone.
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{1, 4}, {1, 2}), 5);
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{1, 4}, {1, 2, 1.5}), 2 + 3 * 1.5);
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{4}, {1, 2, 1.5}), 6);
    // Three blocks on two multiprocessors with two slots: the third shares the first one's, though the other has less
    // to do.
    EXPECT_DOUBLE_EQ(makespan(std::vector<double>{4, 1, 4}, {2, 2}), 8);
}

/// The end is never before an equal share or the longest block, and never after the sum of all blocks. With more
/// multiprocessors than blocks it is the longest block.
TEST(Makespan, bounds) {
    std::mt19937 random(7);
    for (int i = 0; i < 300; ++i) {
        std::vector<double> blocks(1 + random() % 40);
        for (double& block : blocks) block = 1.0 + static_cast<double>(random() % 100);
        const int multiprocessors = 1 + static_cast<int>(random() % 9), each = 1 + static_cast<int>(random() % 2);
        const double sum = std::accumulate(blocks.begin(), blocks.end(), 0.0);
        const double longest = *std::max_element(blocks.begin(), blocks.end());
        const double done = makespan(blocks, {multiprocessors, each});
        EXPECT_GE(done * (1 + 1e-12), std::max(longest, sum / multiprocessors));
        EXPECT_LE(done, sum * (1 + 1e-12));
        EXPECT_DOUBLE_EQ(makespan(blocks, {100}), longest);
        if (each == 1) {
            EXPECT_LE(done, (sum - longest) / multiprocessors + longest + 1e-9);  // Graham's bound
        }
    }
}

}  // namespace
}  // namespace tessera::model
