// SPDX-License-Identifier: Apache-2.0
//
// The order in which blocks of keys add to dQ in cuda.fa3.backward: a fixed one, in which each waits for blocks only
// that started before it. No GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/dq_order.hpp"

namespace tessera::check::fa3_dq_order_test {
namespace {

using cuda::fa3::backward::Blocks;
using cuda::fa3::backward::Steps;

constexpr int kLengths[] = {1, 63, 64, 65, 128, 129, 200, 333, 640, 1000, 2049};

const Mask kMasks[] = {{},
                       {.causal = Causal::bottom_right},
                       {.causal = Causal::top_left},
                       {.window_left = 100, .window_right = 50},
                       {.window_left = 300, .window_right = 0},
                       {.window_left = 0, .window_right = 700},
                       {.causal = Causal::top_left, .window_left = 90},
                       {.causal = Causal::bottom_right, .window_left = 1}};

/// The whole case, for the message of a failure.
std::string describe(const Mask& mask, int block_q, int block_kv, int len_q, int len_kv, int group, int heads,
                     int parts = 1, int more = 0) {
    const Problem p{.batch = 1,
                    .len_q = len_q,
                    .len_kv = len_kv,
                    .heads_q = std::int64_t{group} * heads,
                    .heads_kv = heads,
                    .head_dim = 64,
                    .head_dim_v = 64,
                    .mask = mask};
    return p.describe() + "; tiles of " + std::to_string(block_q) + " x " + std::to_string(block_kv) + ", parts " +
           std::to_string(parts) + ", more " + std::to_string(more);
}

/// Who adds to (sum, block of queries), in the order in which thread blocks start.
using Adders = std::map<std::pair<int, int>, std::vector<int>>;

template <bool kRising, int kBlockQ, int kBlockKv>
Adders adders_of(const Blocks<kBlockQ, kBlockKv>& blocks, int parts, int more) {
    Adders adders;
    const int most = blocks.part_size(parts) + more;
    for (int number = 0; number < parts * most; ++number) {
        const int n = blocks.block_of(number / most, number % most, parts, most);
        if (n >= blocks.count_kv) continue;
        int steps = 0;
        for (Steps<kRising> step(blocks, n, 1); step.more(); step.advance(1), ++steps) {
            adders[{step.which, step.m}].push_back(n);
        }
        EXPECT_EQ(steps, Steps<kRising>(blocks, n, 1).count());
        for (Steps<kRising> step(blocks, n, 3); step.more(); step.advance(3)) --steps;
        EXPECT_EQ(steps, -2 * Steps<kRising>(blocks, n, 1).count()) << "three heads take three times the steps";
    }
    return adders;
}

/// Does any of the pairs of a tile count?
template <int kBlockQ, int kBlockKv>
bool touches(const Mask& mask, const Blocks<kBlockQ, kBlockKv>& blocks, int m, int n) {
    const Band band = mask.bind(blocks.len_q, blocks.len_kv);
    const std::int64_t query = std::int64_t{m} * kBlockQ;
    const std::int64_t key = std::int64_t{n} * kBlockKv;
    return band.coverage(query, std::min(query + kBlockQ, band.len_q), key, std::min(key + kBlockKv, band.len_kv)) !=
           Coverage::empty;
}

/// `more`: blocks that another sequence of the call has more in a part.
template <int kBlockQ, int kBlockKv>
void expect_right(const Mask& mask, int len_q, int len_kv, int group, int heads = 1, int parts = 1, int more = 0) {
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len_q, len_kv, group, heads, parts, more));
    Blocks<kBlockQ, kBlockKv> blocks{};
    blocks.set(mask, len_q, len_kv, group, heads);
    const Adders adders = blocks.rising ? adders_of<true>(blocks, parts, more) : adders_of<false>(blocks, parts, more);
    for (const auto& [sum_and_block, blocks_of_keys] : adders) {
        const auto [sum, m] = sum_and_block;
        for (std::size_t place = 0; place < blocks_of_keys.size(); ++place) {
            const int n = blocks_of_keys[place];
            ASSERT_EQ(blocks.place(sum, m, n), static_cast<int>(place))
                << "sum " << sum << " of queries " << m << ", added to by keys " << n;
        }
    }
    for (int m = 0; m < blocks.count_q; ++m) {
        for (int sum = 0; sum < 2; ++sum) {
            ASSERT_EQ(blocks.any(sum, m), adders.count({sum, m}) != 0) << "sum " << sum << " of queries " << m;
        }
        for (int n = 0; n < blocks.count_kv; ++n) {
            int times = 0;
            for (int sum = 0; sum < 2; ++sum) {
                const auto found = adders.find({sum, m});
                if (found != adders.end())
                    times += static_cast<int>(std::count(found->second.begin(), found->second.end(), n));
            }
            ASSERT_EQ(times, touches(mask, blocks, m, n) ? 1 : 0) << "queries " << m << ", keys " << n;
        }
    }
}

TEST(Fa3DqOrder, every_tile_is_added_once_and_in_the_order_of_the_places) {
    for (const Mask& mask : kMasks) {
        for (const int len_q : kLengths) {
            for (const int len_kv : kLengths) {
                for (const int group : {1, 8}) {
                    expect_right<64, 128>(mask, len_q, len_kv, group);
                    expect_right<128, 128>(mask, len_q, len_kv, group);
                    expect_right<64, 64>(mask, len_q, len_kv, group);
                }
                if (HasFatalFailure()) return;
            }
        }
    }
}

/// Sequences that start in parts, and those that do not, in one call.
TEST(Fa3DqOrder, blocks_in_parts_are_added_in_the_order_of_the_places) {
    using cuda::fa3::backward::kParts;
    for (const Mask& mask : kMasks) {
        for (const int len : {1, 200, 2048, 2111, 4000, 4096, 4097, 5555}) {
            for (const int more : {0, 3}) {
                expect_right<64, 128>(mask, len, len, 1, 16, kParts, more);
                expect_right<128, 128>(mask, len, len, 1, 16, kParts, more);
            }
            expect_right<64, 128>(mask, len, len / 2 + 1, 1, 16, kParts);
            if (HasFatalFailure()) return;
        }
    }
}

/// The longest of a causal mask start first but for the order in their part, and blocks of one sequence alone decide.
TEST(Fa3DqOrder, causal_blocks_of_many_heads_start_in_parts) {
    Blocks<64, 128> blocks{};
    const Mask causal{.causal = Causal::top_left};
    blocks.set(causal, 4096, 4096, 1, 16);
    ASSERT_TRUE(blocks.parted);
    EXPECT_EQ(blocks.block_of(0, 0, 4, 8), 7);
    EXPECT_EQ(blocks.block_of(3, 7, 4, 8), 24);
    EXPECT_EQ(blocks.place(0, 63, 7), 0);
    EXPECT_EQ(blocks.place(0, 63, 31), 24);
    EXPECT_EQ(blocks.place(0, 63, 24), 31);
    for (const auto& [len_q, len_kv, group, heads] : {std::array{4096, 4096, 2, 16}, std::array{4096, 4096, 1, 7},
                                                      std::array{4096, 5000, 1, 16}, std::array{896, 896, 1, 64}}) {
        blocks.set(causal, len_q, len_kv, group, heads);
        EXPECT_FALSE(blocks.parted) << len_q << " " << len_kv << " " << group << " " << heads;
    }
    blocks.set({}, 4096, 4096, 1, 16);
    EXPECT_FALSE(blocks.parted);
}

/// Without a mask few blocks of keys start together, with one sum; more of them do not, nor do those of groups.
TEST(Fa3DqOrder, few_blocks_without_a_mask_start_at_the_first_queries) {
    using cuda::fa3::backward::kMostStraight;
    Blocks<64, 128> blocks{};
    blocks.set({}, 1000, 128 * kMostStraight, 1, 1);
    for (int n = 0; n < blocks.count_kv; ++n) ASSERT_EQ(blocks.start_of(n), 0);
    for (int m = 0; m < blocks.count_q; ++m) ASSERT_FALSE(blocks.any(1, m));
    EXPECT_EQ(blocks.place(0, 3, kMostStraight - 1), 0);
    EXPECT_EQ(blocks.place(0, 3, 0), kMostStraight - 1);
    blocks.set({}, 1000, 128 * kMostStraight + 1, 1, 1);
    EXPECT_TRUE(blocks.any(1, 0));
    blocks.set({}, 1000, 1000, 2, 1);
    EXPECT_TRUE(blocks.any(1, 0));
}

/// Who makes dQ of the sum: where Blocks says that it is the first block, of the head or of its part, it is, of all of
/// dQ.
TEST(Fa3DqOrder, the_last_to_add_is_the_first_block_where_it_is_said_to_be) {
    using cuda::fa3::backward::kParts;
    int said = 0;
    for (const Mask& mask : kMasks) {
        for (const int len_q : {1, 128, 200, 640, 1000, 2048, 2049, 4096}) {
            for (const int len_kv : {1, 128, 200, 640, 1000, 2048, 2049, 4096}) {
                for (const int group : {1, 8}) {
                    Blocks<64, 128> blocks{};
                    blocks.set(mask, len_q, len_kv, group, 16);
                    if (!blocks.ends_with_first()) continue;
                    SCOPED_TRACE(describe(mask, 64, 128, len_q, len_kv, group, 16, blocks.parted ? kParts : 1));
                    ++said;
                    const Adders adders = adders_of<false>(blocks, blocks.parted ? kParts : 1, 0);
                    for (int m = 0; m < blocks.count_q; ++m) {
                        const auto found = adders.find({0, m});
                        ASSERT_TRUE(found != adders.end() && adders.count({1, m}) == 0) << m;
                        const int n = found->second.back();
                        ASSERT_EQ(n, blocks.added_before(n)) << m;
                        ASSERT_EQ(blocks.place(0, m, n) + 1, blocks.keys_of(m).end) << m;
                    }
                }
            }
        }
    }
    EXPECT_GT(said, 50);
}

/// All heads of a group are gone through at one block of queries.
TEST(Fa3DqOrder, heads_of_a_group_stay_together_where_blocks_rise) {
    Blocks<64, 128> blocks{};
    blocks.set({.causal = Causal::bottom_right}, 1024, 1024, 4, 1);
    ASSERT_TRUE(blocks.rising);
    Steps<true> step(blocks, 3, 4);
    for (int m = 15; m >= 6; --m) {
        for (int left = 4; left > 0; --left, step.advance(4)) {
            ASSERT_TRUE(step.more());
            ASSERT_EQ(step.m, m);
            ASSERT_EQ(step.heads, left);
            ASSERT_EQ(step.which, 0);
        }
    }
    ASSERT_FALSE(step.more());
}

/// A part of its own for each block, so that heads take turns: the longest blocks of all heads first, or, falling, the
/// last blocks.
TEST(Fa3DqOrder, single_blocks_in_turn_are_added_in_the_order_of_the_places) {
    for (const Mask& mask : kMasks) {
        for (const int len : {1, 200, 640, 2049}) {
            const int count = (len + 127) / 128;
            for (const int more : {0, 3}) {
                expect_right<64, 128>(mask, len, len, 8, 8, count + more);
                expect_right<128, 128>(mask, len, len, 8, 8, count + more);
                expect_right<64, 128>(mask, len / 2 + 1, len, 8, 8, count + more);
            }
            if (HasFatalFailure()) return;
        }
    }
}

/// Few causal blocks of keys share their query heads out, so many that no block lasts too long; which is a matter of
/// the sequence's length and the heads.
TEST(Fa3DqOrder, few_causal_blocks_of_groups_share_the_query_heads) {
    using cuda::fa3::backward::most_shares;
    const Mask causal{.causal = Causal::bottom_right};
    Blocks<64, 128> blocks{};
    const auto shares = [&](int len, int group, int heads) {
        blocks.set(causal, len, len, group, heads);
        EXPECT_EQ(blocks.shares * blocks.share_heads, group) << len;
        EXPECT_TRUE(blocks.rising);
        EXPECT_LE(blocks.shares, most_shares(causal, group, heads, len, 128)) << len;
        return blocks.shares;
    };
    EXPECT_EQ(shares(2048, 8, 8), 2);
    EXPECT_EQ(shares(32768, 8, 8), 2) << "no more than four heads at a stop";
    EXPECT_EQ(shares(4096, 4, 8), 1) << "256 blocks";
    EXPECT_EQ(shares(2048, 4, 8), 2) << "128 blocks";
    EXPECT_EQ(shares(1024, 4, 8), 1) << "64 steps";
    EXPECT_EQ(shares(512, 8, 8), 1) << "64 steps";
    EXPECT_EQ(shares(4096, 64, 1), 16);
    EXPECT_EQ(shares(4096, 6, 2), 2) << "three heads are an odd number";
    EXPECT_EQ(shares(4096, 7, 2), 1);
    for (int len = 1; len < 9000; len += 37) shares(len, 16, 2);
    EXPECT_EQ(most_shares(causal, 1, 8, 4096, 128), 1);
    EXPECT_EQ(most_shares({}, 8, 8, 4096, 128), 1);
    for (const auto& [mask, len_q] : {std::pair{Mask{}, 2048}, {causal, 2047}, {Mask{.window_right = 5}, 2048}}) {
        blocks.set(mask, len_q, 2048, 8, 8);
        EXPECT_EQ(blocks.shares, 1);
        EXPECT_EQ(blocks.share_heads, 8);
    }
}

/// All blocks of queries that see all keys of a warpgroup, and no others, are said to.
template <int kBlockQ, int kBlockKv>
void expect_full(const Mask& mask, int len_q, int len_kv) {
    constexpr int kKeys = 64;
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len_q, len_kv, 1, 1));
    Blocks<kBlockQ, kBlockKv> blocks{};
    blocks.set(mask, len_q, len_kv, 1, 1);
    const Band band = mask.bind(len_q, len_kv);
    for (int key = 0; key < blocks.count_kv * kBlockKv; key += kKeys) {
        const auto [begin, end] = blocks.full_queries_of(key, kKeys);
        for (int m = 0; m < blocks.count_q; ++m) {
            const std::int64_t query = std::int64_t{m} * kBlockQ;
            const bool full = query + kBlockQ <= len_q && key + kKeys <= len_kv &&
                              band.coverage(query, query + kBlockQ, key, key + kKeys) == Coverage::full;
            ASSERT_EQ(m >= begin && m < end, full) << "queries " << m << ", keys from " << key;
        }
    }
}

TEST(Fa3DqOrder, tiles_without_hidden_pairs_are_known) {
    for (const Mask& mask : kMasks) {
        for (const int len_q : kLengths) {
            for (const int len_kv : kLengths) {
                expect_full<64, 128>(mask, len_q, len_kv);
                expect_full<128, 128>(mask, len_q, len_kv);
                if (HasFatalFailure()) return;
            }
        }
    }
}

template <int kBlockQ, int kBlockKv>
void expect_one_sum(const Mask& mask, int len, int group) {
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len, len, group, 1000));
    Blocks<kBlockQ, kBlockKv> blocks{};
    blocks.set(mask, len, len, group, 1000);
    for (int m = 0; m < blocks.count_q; ++m) ASSERT_FALSE(blocks.any(1, m)) << "queries " << m;
}

TEST(Fa3DqOrder, one_sum_is_enough_where_the_workspace_has_one) {
    for (const Mask& mask : kMasks) {
        for (const int len : kLengths) {
            for (const int group : {1, 4}) {
                const Problem p{.len_q = len, .len_kv = len, .heads_q = group, .heads_kv = 1, .mask = mask};
                if (cuda::fa3::backward::sums_of_dq(p) == 2) continue;
                expect_one_sum<64, 128>(mask, len, group);
                expect_one_sum<128, 128>(mask, len, group);
            }
        }
    }
}

TEST(Fa3DqOrder, blocks_without_a_mask_start_apart) {
    Blocks<64, 128> blocks{};
    blocks.set({}, 4096, 4096, 1, 1);
    for (int n = 0; n < blocks.count_kv; ++n) ASSERT_EQ(Steps<false>(blocks, n, 1).m, 2 * n);
    Blocks<128, 128> square{};
    square.set({}, 4096, 4096, 1, 1);
    for (int n = 0; n < square.count_kv; ++n) ASSERT_EQ(Steps<false>(square, n, 1).m, n);
}

}  // namespace
}  // namespace tessera::check::fa3_dq_order_test
