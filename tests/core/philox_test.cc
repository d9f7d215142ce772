// SPDX-License-Identifier: Apache-2.0
#include "core/dropout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
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

/// The random word as docs/numerics.md defines it ("Dropout").
std::uint32_t word_of(std::uint64_t seed, std::uint64_t batch, std::uint64_t head, std::uint64_t query,
                      std::uint64_t key) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    std::uint32_t word = 0;
    for (std::uint64_t bit = 0; bit < 32; ++bit) {
        const PhiloxBlock block =
            philox4x32({low(query / 2), low(key / 16 + (bit / 4 << 28)), low(head), low(batch)}, seed);
        word |= (block[bit % 4] >> (16 * (query % 2) + 8 * (key % 2) + key % 16 / 2) & 1) << (31 - bit);
    }
    return word;
}

TEST(Dropout, word_is_addressed_by_batch_head_query_key) {
    const std::uint64_t seed = 0x0123456789abcdef;
    for (std::int64_t query = 10; query < 13; ++query) {
        for (std::int64_t key = 0; key < 34; ++key) {
            EXPECT_EQ(dropout_word(seed, 3, 5, query, key), word_of(seed, 3, 5, query, key)) << query << " " << key;
        }
    }
    // The largest indices of the contract.
    const std::int64_t last = (std::int64_t{1} << 32) - 1;
    EXPECT_EQ(dropout_word(1, last, last, last, last), word_of(1, last, last, last, last));
    EXPECT_EQ(dropout_word(1, last, last, last, last) & 1,
              philox4x32({0x7fffffff, 0x7fffffff, 0xffffffff, 0xffffffff}, 1)[3] >> 31);
}

TEST(Dropout, every_weight_of_a_patch_has_a_bit_of_its_own) {
    std::uint32_t seen = 0;
    for (std::int64_t query = 6; query < 8; ++query) {
        for (std::int64_t key = 32; key < 48; ++key) seen |= 1U << bit_in_patch(query, key);
    }
    EXPECT_EQ(seen, ~0U);
}

/// A patch's first query and key.
struct Corner {
    std::int64_t batch, head, query, key;
    DropoutPatch patch() const { return dropout_patch(batch, head, query, key); }
};

/// The result of kept_weights(), computed from whole words.
std::uint32_t kept_by_words(std::uint64_t seed, std::uint64_t threshold, const Corner& at) {
    std::uint32_t kept = 0;
    for (std::int64_t query = at.query; query < at.query + 2; ++query) {
        for (std::int64_t key = at.key; key < at.key + 16; ++key) {
            const bool is_kept = dropout_word(seed, at.batch, at.head, query, key) < threshold;
            kept |= (is_kept ? 1U : 0U) << bit_in_patch(query, key);
        }
    }
    return kept;
}

TEST(Dropout, kept_weights_are_the_words_under_the_threshold) {
    const std::int64_t last = (std::int64_t{1} << 32) - 1;
    for (const double p : {0.0, 1e-12, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.96875, 0.999999, 1 - 1e-9}) {
        for (const std::uint64_t seed :
             {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
            for (const Corner& at : {Corner{0, 0, 0, 0}, Corner{0, 1, 2, 48}, Corner{9, 0, 100, 4096},
                                     Corner{last, last, last - 1, last - 15}}) {
                const std::uint64_t threshold = keep_threshold(p);
                EXPECT_EQ(kept_weights(KeepRule(seed, threshold), at.patch()), kept_by_words(seed, threshold, at)) << p;
            }
        }
    }
}

// The threshold is a weight's word, which is then dropped, or one more. They are equal up to the last bits.
TEST(Dropout, every_bit_of_a_word_counts) {
    const Corner at{2, 3, 4, 32};
    for (std::int64_t query = at.query; query < at.query + 2; ++query) {
        for (std::int64_t key = at.key; key < at.key + 16; ++key) {
            const std::uint32_t bit = 1U << bit_in_patch(query, key);
            for (const std::uint64_t more : {0, 1}) {
                const std::uint64_t threshold = dropout_word(5, at.batch, at.head, query, key) + more;
                const KeepRule rule(5, threshold);
                EXPECT_EQ(kept_weights(rule, at.patch()), kept_by_words(5, threshold, at));
                EXPECT_EQ((kept_weights(rule, at.patch(), bit) & bit) != 0, more == 1);
            }
        }
    }
}

/// The mean number of blocks that decide all `wanted` weights, over many patches.
double mean_blocks(double p, std::uint32_t wanted) {
    const KeepRule rule(11, keep_threshold(p));
    constexpr int kPatches = 4096;
    int blocks = 0;
    for (int i = 0; i < kPatches; ++i) {
        const DropoutPatch patch{.queries = static_cast<std::uint32_t>(i), .keys = 5, .head = 1, .batch = 2};
        KeptBits bits;
        for (int block = 0; block < rule.blocks && (bits.level & wanted) != 0; ++block, ++blocks) {
            bits.add(kept_bits(rule, patch, block));
        }
    }
    return static_cast<double>(blocks) / kPatches;
}

TEST(Dropout, few_blocks_are_drawn) {
    EXPECT_EQ(mean_blocks(0, ~0U), 0);
    EXPECT_EQ(mean_blocks(0.5, ~0U), 1);
    EXPECT_EQ(mean_blocks(0.25, ~0U), 1);
    EXPECT_EQ(mean_blocks(1 - 0x1p-4, ~0U), 1);
    EXPECT_EQ(KeepRule(0, keep_threshold(0x1p-32)).blocks, 8);
    EXPECT_EQ(KeepRule(0, 1).blocks, 8);
    // Sum over n of the probability that some word equals the threshold after n blocks: 1 + (1 - (1 - 1/16)^32) + ...
    for (const double p : {0.1, 0.9, 0.3}) {
        EXPECT_NEAR(mean_blocks(p, ~0U), 1.999, 0.05) << p;
        EXPECT_NEAR(mean_blocks(p, 1U << 19), 1.0667, 0.02) << p;
    }
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

TEST(BugFamilies, keep_rate_is_right_in_every_place_row_head_and_batch_bug_53) {
    constexpr std::int64_t kKeys = 512, kQueries = 64, kHeads = 4, kBatches = 4;
    for (const double p : {0.1, 0.5, 0.9}) {
        const KeepRule rule(42, keep_threshold(p));
        std::vector<std::int64_t> by_place(32), by_query(kQueries), by_key(kKeys), by_head(kHeads), by_batch(kBatches);
        for (std::int64_t b = 0; b < kBatches; ++b) {
            for (std::int64_t h = 0; h < kHeads; ++h) {
                for (std::int64_t q = 0; q < kQueries; ++q) {
                    for (std::int64_t k = 0; k < kKeys; ++k) {
                        const int place = bit_in_patch(q, k);
                        const std::uint32_t kept = kept_weights(rule, dropout_patch(b, h, q, k), 1U << place);
                        if ((kept >> place & 1) == 0) continue;
                        for (auto* count :
                             {&by_place[static_cast<std::size_t>(place)], &by_query[static_cast<std::size_t>(q)],
                              &by_key[static_cast<std::size_t>(k)], &by_head[static_cast<std::size_t>(h)],
                              &by_batch[static_cast<std::size_t>(b)]}) {
                            ++*count;
                        }
                    }
                }
            }
        }
        // Limits: the 1 - 1e-5 quantiles of chi-square with as many degrees of freedom as groups.
        const double total = static_cast<double>(kKeys * kQueries * kHeads * kBatches);
        EXPECT_LT(chi_square(by_place, total / 32, 1 - p), 78.1) << p;
        EXPECT_LT(chi_square(by_head, total / kHeads, 1 - p), 28.5) << p;
        EXPECT_LT(chi_square(by_batch, total / kBatches, 1 - p), 28.5) << p;
        EXPECT_LT(chi_square(by_query, total / kQueries, 1 - p), 123.0) << p;
        EXPECT_LT(chi_square(by_key, total / kKeys, 1 - p), 660.1) << p;
    }
}

/// How often bit i of `a` and bit j of `b` are set together, in samples of rate `rate`: chi-square over all i and j, or
/// over i < j if `a` is `b`; `pairs` is the degrees of freedom. `worst`: of the worst pair, in standard deviations.
struct Together {
    double chi_square = 0;
    double worst = 0;
    int pairs = 0;

    Together(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b, double rate) {
        const auto samples = static_cast<double>(a.size());
        const auto set = [](std::uint32_t word, int bit) { return (word >> bit & 1) != 0; };
        for (int i = 0; i < 32; ++i) {
            for (int j = &a == &b ? i + 1 : 0; j < 32; ++j) {
                double sum = 0;
                for (std::size_t n = 0; n < a.size(); ++n) {
                    sum += ((set(a[n], i) ? 1 : 0) - rate) * ((set(b[n], j) ? 1 : 0) - rate);
                }
                const double deviations = sum / (std::sqrt(samples) * rate * (1 - rate));
                chi_square += deviations * deviations;
                worst = std::max(worst, std::abs(deviations));
                ++pairs;
            }
        }
    }
};

void expect_independent(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b, double rate) {
    const Together t(a, b, rate);
    EXPECT_LT(t.worst, 5.2);  // of 1,024 normal variables once in 5,000 times
    EXPECT_NEAR(t.chi_square, t.pairs, 4.5 * std::sqrt(2.0 * t.pairs));
}

TEST(BugFamilies, weights_of_a_patch_and_of_its_neighbours_are_independent_bug_53) {
    constexpr std::uint32_t kPatches = 8192;
    for (const double p : {0.1, 0.5, 0.7}) {
        const KeepRule rule(43, keep_threshold(p));
        const auto patches = [&](const DropoutPatch& step) {
            std::vector<std::uint32_t> kept;
            for (std::uint32_t n = 0; n < kPatches; ++n) {
                kept.push_back(kept_weights(rule, {.queries = 2 * (n % 64) + step.queries,
                                                   .keys = 2 * (n / 64) + step.keys,
                                                   .head = 3 + step.head,
                                                   .batch = 1 + step.batch}));
            }
            return kept;
        };
        const auto base = patches({});
        expect_independent(base, base, 1 - p);
        for (const DropoutPatch& step :
             {DropoutPatch{.queries = 1}, DropoutPatch{.keys = 1}, DropoutPatch{.head = 1}, DropoutPatch{.batch = 1}}) {
            expect_independent(base, patches(step), 1 - p);
        }
    }
}

TEST(BugFamilies, bits_of_a_word_and_of_its_neighbours_are_independent_bug_53) {
    const auto words = [](std::int64_t query, std::int64_t key) {
        std::vector<std::uint32_t> result;
        for (std::int64_t n = 0; n < 8192; ++n) {
            result.push_back(dropout_word(44, 1, 2, n / 128 * 4 + query, n % 128 * 32 + key));
        }
        return result;
    };
    const auto base = words(0, 0);
    expect_independent(base, base, 0.5);
    for (const auto& [query, key] : {std::pair{0, 1}, {0, 2}, {1, 0}, {1, 1}, {0, 16}, {2, 0}}) {
        expect_independent(base, words(query, key), 0.5);
    }
}

TEST(BugFamilies, masks_of_seeds_batches_heads_and_queries_differ_bug_53) {
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
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 2, 2, k); })));
    for (const std::int64_t step : {1, 2, 8, 16, 32}) {
        EXPECT_TRUE(near_half(agreement(base, [&](std::int64_t k) { return dropout_word(9, 1, 2, 3, k + step); })));
    }
    EXPECT_TRUE(near_half(agreement(base, [](std::int64_t k) { return dropout_word(9, 1, 2, 3, k + (1ll << 31)); })));
}

}  // namespace
}  // namespace tessera::philox_test
