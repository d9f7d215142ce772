// SPDX-License-Identifier: Apache-2.0
//
// The split of a group's query heads over CTAs (cuda/backward/host/head_split.hpp). No GPU is needed.
#include <gtest/gtest.h>

#include "cuda/backward/host/head_split.hpp"

namespace tessera::check::head_split_test {
namespace {

using cuda::EvenHeadSplit;
using cuda::HeadSplit;

constexpr Mask kCausal{.causal = Causal::bottom_right};

int splits(const Mask& mask, std::int64_t len_q, std::int64_t len_kv, int group) {
    return HeadSplit::num_splits(mask.bind(len_q, len_kv), group);
}

TEST(HeadSplit, few_key_blocks_split_the_heads) {
    EXPECT_EQ(splits(kCausal, 512, 512, 8), 2);
    EXPECT_EQ(splits(kCausal, 2048, 2048, 8), 4);
    EXPECT_EQ(splits(kCausal, 4096, 4096, 8), 2);
    EXPECT_EQ(splits(kCausal, 8192, 8192, 8), 2);
    EXPECT_EQ(splits(kCausal, 16384, 16384, 8), 1);
    EXPECT_EQ(splits({}, 1024, 1024, 8), 2);
    EXPECT_EQ(splits({}, 2048, 2048, 8), 1);
    EXPECT_EQ(splits(kCausal, 2048, 2048, 64), 32);
    EXPECT_EQ(splits(kCausal, 2048, 2048, 1), 1);  // nothing to split
    EXPECT_EQ(splits({}, 1, 4096, 64), 1);         // too little work to pay for the sum
    EXPECT_EQ(HeadSplit::num_splits(0, 0), 1);     // no query heads: dK and dV are still written
}

/// Every head is in one split, and no split is empty.
TEST(HeadSplit, each_head_is_in_one_split) {
    for (int group = 1; group < 80; ++group) {
        for (std::int64_t len = 1; len < 40000; len = len * 3 / 2 + 1) {
            const int heads = HeadSplit::heads_per_split(kCausal.bind(len, len), group);
            const int count = HeadSplit::num_splits(heads, group);
            EXPECT_GE(heads * count, group);
            EXPECT_LT(heads * (count - 1), group);
        }
    }
}

/// A ragged batch has memory for max_splits().
TEST(HeadSplit, no_sequence_has_more_than_max_splits) {
    for (const Mask& mask : {Mask{}, kCausal, Mask{.window_left = 100}}) {
        for (const int group : {1, 2, 7, 64}) {
            const int most = HeadSplit::max_splits(mask, 3000, 5000, group);
            for (std::int64_t len_kv = 0; len_kv <= 5000; len_kv += 61) {
                for (const std::int64_t len_q : {std::int64_t{0}, std::int64_t{2999}, len_kv}) {
                    if (len_q > 3000) continue;
                    EXPECT_LE(splits(mask, len_q, len_kv, group), most);
                }
            }
        }
    }
}

/// fa3's rule: all splits have equally many heads, and a ragged batch has memory for max_splits().
TEST(EvenHeadSplit, splits_have_equally_many_heads_and_at_most_max_splits) {
    for (const int group : {2, 6, 7, 8, 64}) {
        for (const int block_kv : {64, 128}) {
            const int most = EvenHeadSplit::max_splits(kCausal, group, 9000, block_kv);
            for (int len = 1; len <= 9000; len += 37) {
                const int count = EvenHeadSplit::num_splits(group, (len + block_kv - 1) / block_kv, len);
                EXPECT_EQ(group % count, 0) << len;
                EXPECT_LE(count, most) << len;
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::head_split_test
