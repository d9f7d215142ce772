// SPDX-License-Identifier: Apache-2.0
#include "core/dropout.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera::philox_test {
namespace {

// Known answers of philox4x32-10 in the Random123 distribution (tests/kat_vectors). The key's first word is the low
// half of the seed.
static_assert(philox4x32({0, 0, 0, 0}, 0) == PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});

TEST(Philox, known_answers) {
    EXPECT_EQ(philox4x32({0, 0, 0, 0}, 0), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff),
              (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
              (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, word_is_addressed_by_batch_head_query_key) {
    const std::uint64_t seed = 0x0123456789abcdef;
    for (std::int64_t key = 0; key < 9; ++key) {
        const PhiloxBlock block = philox4x32({static_cast<std::uint32_t>(key / 4), 11, 5, 3}, seed);
        EXPECT_EQ(dropout_word(seed, 3, 5, 11, key), block[static_cast<std::size_t>(key % 4)]);
    }
    // The largest indices of the contract: 2^32 keys fit, since four share a counter.
    const std::int64_t last = (std::int64_t{1} << 32) - 1;
    EXPECT_EQ(dropout_word(1, last, last, last, last),
              philox4x32({0x3fffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 1)[3]);
}

TEST(Philox, keep_threshold_is_exact_to_2_to_the_minus_32) {
    EXPECT_EQ(keep_threshold(0), std::uint64_t{1} << 32);
    EXPECT_EQ(keep_threshold(0.5), std::uint64_t{1} << 31);
    EXPECT_EQ(keep_threshold(0.25), std::uint64_t{3} << 30);
    EXPECT_EQ(keep_threshold(1 - 0x1p-32), 1u);
    EXPECT_EQ(keep_threshold(0x1p-32), (std::uint64_t{1} << 32) - 1);
    EXPECT_EQ(keep_threshold(0x1p-40), std::uint64_t{1} << 32);
    EXPECT_EQ(keep_threshold(std::nextafter(1.0, 0.0)), 1u);  // 0 would be no dropout at all
    for (int i = 1; i < 1000; ++i) {
        const double p = i / 1000.0;
        const double kept = static_cast<double>(keep_threshold(p)) * 0x1p-32;
        EXPECT_LE(std::fabs(kept - (1 - p)), 0x1p-33) << p;
    }
}

TEST(Philox, all_words_are_kept_without_dropout) {
    // The largest word is under the threshold of p = 0: "free" means that nothing is ever dropped.
    EXPECT_LT(std::uint64_t{0xffffffff}, keep_threshold(0));
}

/// Pearson's chi-square of kept counts over groups of equal size.
double chi_square(const std::vector<std::int64_t>& kept, double group_size, double keep) {
    double sum = 0;
    for (const std::int64_t count : kept) {
        const double difference = static_cast<double>(count) - group_size * keep;
        sum += difference * difference / (group_size * keep * (1 - keep));
    }
    return sum;
}

// FA #314, PT #99905, ffpa #352, FA PR #2439: masks that repeat, or keep 0.977 instead of 0.90.
TEST(Bugs, bug_53_keep_rate_is_right_in_every_lane_row_head_and_batch) {
    constexpr std::int64_t kKeys = 512, kQueries = 64, kHeads = 4, kBatches = 4;
    for (const double p : {0.1, 0.5, 0.9}) {
        const std::uint64_t threshold = keep_threshold(p);
        std::vector<std::int64_t> by_lane(4), by_query(kQueries), by_head(kHeads), by_batch(kBatches);
        for (std::int64_t b = 0; b < kBatches; ++b) {
            for (std::int64_t h = 0; h < kHeads; ++h) {
                for (std::int64_t q = 0; q < kQueries; ++q) {
                    for (std::int64_t k = 0; k < kKeys; ++k) {
                        if (dropout_word(42, b, h, q, k) >= threshold) continue;
                        for (auto* count :
                             {&by_lane[static_cast<std::size_t>(k % 4)], &by_query[static_cast<std::size_t>(q)],
                              &by_head[static_cast<std::size_t>(h)], &by_batch[static_cast<std::size_t>(b)]}) {
                            ++*count;
                        }
                    }
                }
            }
        }
        // Limits: the 1 - 1e-5 quantiles of chi-square with as many degrees of freedom as groups.
        const double total = static_cast<double>(kKeys * kQueries * kHeads * kBatches);
        EXPECT_LT(chi_square(by_lane, total / 4, 1 - p), 28.5) << p;
        EXPECT_LT(chi_square(by_head, total / kHeads, 1 - p), 28.5) << p;
        EXPECT_LT(chi_square(by_batch, total / kBatches, 1 - p), 28.5) << p;
        EXPECT_LT(chi_square(by_query, total / kQueries, 1 - p), 123.0) << p;
    }
}

TEST(Bugs, bug_53_masks_of_seeds_batches_heads_and_queries_differ) {
    // Independent masks of keep rate 1/2 agree on half of the keys.
    const auto agreement = [](auto first, auto second) {
        int same = 0;
        for (std::int64_t k = 0; k < 4096; ++k) same += (first(k) >> 31) == (second(k) >> 31);
        return same;
    };
    const auto base = [](std::int64_t k) { return dropout_word(9, 1, 2, 3, k); };
    const auto near_half = [](int same) { return same > 2048 - 160 && same < 2048 + 160; };  // 5 standard deviations
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(10, 1, 2, 3, k); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9 + (1ull << 32), 1, 2, 3, k); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 2, 2, 3, k); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 3, 3, k); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 2, 4, k); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 2, 3, k + 1); })));
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 2, 3, k + (1ll << 31)); })));
}

}  // namespace
}  // namespace tessera::philox_test
