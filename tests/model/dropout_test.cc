// SPDX-License-Identifier: Apache-2.0
//
// Compares the number of Philox blocks that dropout takes with words that are drawn bit by bit.
#include "model/dropout.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "core/dropout.hpp"

namespace tessera::dropout_model_test {
namespace {

using model::philox_blocks;
using model::PhiloxDraws;

/// Blocks that a kernel takes until every word is over the threshold, or under it whatever comes.
double drawn(double probability, const PhiloxDraws& philox) {
    constexpr int kTimes = 3000, kBits = 32, kBitsOfBlock = 4;
    const auto last = static_cast<std::uint32_t>(keep_threshold(probability) - 1);
    std::mt19937 random(7);
    double sum = 0;
    int useful = 0;  // blocks after which all later bits mean "kept"
    for (int rest = kBits; rest > 0; rest -= kBitsOfBlock)
        if ((~last << (kBits - rest) >> (kBits - rest)) != 0) ++useful;
    for (int time = 0; time < kTimes; ++time) {
        int most = 0;
        for (int word = 0; word < static_cast<int>(philox.words); ++word) {
            const auto bits = static_cast<std::uint32_t>(random());
            int block = 0;  // the first after which the word differs from the threshold, or is kept in any case
            for (bool level = true; level && block * kBitsOfBlock < kBits; ++block) {
                const int left = kBits - (block + 1) * kBitsOfBlock;
                const bool same = left == 0 || bits >> left == last >> left;
                const std::uint32_t ones = left == 0 ? 0 : ~0U >> (kBits - left);
                level = same && left > 0 && (last & ones) != ones;
            }
            most = std::max(most, block);
        }
        const int first = philox.skips_unused ? std::min(philox.first, useful) : philox.first;
        int made = first;
        while (made < most) made += philox.further;
        sum += made;
    }
    return sum / kTimes;
}

TEST(DropoutModel, blocks_are_those_that_words_take) {
    for (const double probability : {0.1, 0.5, 0.25, 1.0 / 16, 0.3, 0.999, 1e-9}) {
        for (const PhiloxDraws& philox :
             {PhiloxDraws{}, PhiloxDraws{.first = 3, .further = 3}, PhiloxDraws{.weights = 1, .words = 32},
              PhiloxDraws{.words = 512, .first = 3, .skips_unused = true}}) {
            EXPECT_NEAR(philox_blocks(probability, philox), drawn(probability, philox), 0.1)
                << probability << ", " << philox.words << " words, " << philox.first << " at once";
        }
    }
}

TEST(DropoutModel, known_values) {
    EXPECT_EQ(philox_blocks(0, {}), 0);
    EXPECT_EQ(philox_blocks(0.5, {}), 1);
    EXPECT_EQ(philox_blocks(0.5, {.first = 3, .further = 3}), 3);
    EXPECT_NEAR(philox_blocks(0.1, {}), 3.22, 0.005);
}

}  // namespace
}  // namespace tessera::dropout_model_test
