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

using model::blocks_of_draw;
using model::Drawing;

/// Blocks that a kernel takes until every word is over the threshold, or under it whatever its later bits are.
double drawn(double probability, const Drawing& drawing) {
    constexpr int kTimes = 3000, kBits = 32, kBitsOfBlock = 4;
    const auto last = static_cast<std::uint32_t>(keep_threshold(probability) - 1);
    std::mt19937 random(7);
    double sum = 0;
    int useful = 0;  // blocks after which all later bits mean "kept"
    for (int rest = kBits; rest > 0; rest -= kBitsOfBlock)
        if ((~last << (kBits - rest) >> (kBits - rest)) != 0) ++useful;
    for (int time = 0; time < kTimes; ++time) {
        int most = 0;
        for (int word = 0; word < static_cast<int>(drawing.together); ++word) {
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
        const int first = drawing.spares ? std::min(drawing.first, useful) : drawing.first;
        int made = first;
        while (made < most) made += drawing.further;
        sum += made;
    }
    return sum / kTimes;
}

TEST(DropoutModel, blocks_are_those_that_words_take) {
    for (const double probability : {0.1, 0.5, 0.25, 1.0 / 16, 0.3, 0.999, 1e-9}) {
        for (const Drawing& drawing :
             {Drawing{}, Drawing{.first = 3, .further = 3}, Drawing{.weights = 1, .together = 32},
              Drawing{.together = 512, .first = 3, .spares = true}}) {
            EXPECT_NEAR(blocks_of_draw(probability, drawing), drawn(probability, drawing), 0.1)
                << probability << ", " << drawing.together << " words, " << drawing.first << " at once";
        }
    }
}

TEST(DropoutModel, known_values) {
    EXPECT_EQ(blocks_of_draw(0, {}), 0);
    EXPECT_EQ(blocks_of_draw(0.5, {}), 1);
    EXPECT_EQ(blocks_of_draw(0.5, {.first = 3, .further = 3}), 3);
    EXPECT_NEAR(blocks_of_draw(0.1, {}), 3.22, 0.005);
}

}  // namespace
}  // namespace tessera::dropout_model_test
