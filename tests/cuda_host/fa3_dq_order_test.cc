// SPDX-License-Identifier: Apache-2.0
//
// The fixed order in which key blocks add to dQ in cuda.fa3.backward: each waits only for blocks that started before
// it. No GPU is needed.
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

using cuda::QueryParts;
using cuda::fa3::backward::BlockSchedule;
using cuda::fa3::backward::StepIterator;

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
std::string describe(const Mask& mask, int block_q, int block_kv, int len_q, int len_kv, int group, int segments = 1,
                     int more = 0) {
    const Problem p{.batch = 1,
                    .len_q = len_q,
                    .len_kv = len_kv,
                    .heads_q = group,
                    .heads_kv = 1,
                    .head_dim = 64,
                    .head_dim_v = 64,
                    .mask = mask};
    return p.describe() + "; tiles of " + std::to_string(block_q) + " x " + std::to_string(block_kv) + ", segments " +
           std::to_string(segments) + ", more " + std::to_string(more);
}

/// The key blocks that add to (accumulator, query block), in the order in which their CTAs start.
using Adders = std::map<std::pair<int, int>, std::vector<int>>;

template <bool kAscending, int kBlockQ, int kBlockKv>
Adders adders_of(const BlockSchedule<kBlockQ, kBlockKv>& schedule, int segments, int more) {
    Adders adders;
    const int most = schedule.segment_size(segments) + more;
    for (int number = 0; number < segments * most; ++number) {
        const int n = schedule.key_block(number / most, number % most, segments, most);
        if (n >= schedule.count_kv) continue;
        int steps = 0;
        for (StepIterator<kAscending> step(schedule, n, 1); step.more(); step.advance(1), ++steps) {
            adders[{step.accumulator, step.m}].push_back(n);
        }
        EXPECT_EQ(steps, StepIterator<kAscending>(schedule, n, 1).count());
        for (StepIterator<kAscending> step(schedule, n, 3); step.more(); step.advance(3)) --steps;
        EXPECT_EQ(steps, -2 * StepIterator<kAscending>(schedule, n, 1).count())
            << "three heads take three times the steps";
    }
    return adders;
}

/// Is any pair of a tile visible?
template <int kBlockQ, int kBlockKv>
bool touches(const Mask& mask, const BlockSchedule<kBlockQ, kBlockKv>& schedule, int m, int n) {
    const Band band = mask.bind(schedule.len_q, schedule.len_kv());
    const std::int64_t query = std::int64_t{m} * kBlockQ;
    const std::int64_t key = std::int64_t{n} * kBlockKv;
    return band.coverage(query, std::min(query + kBlockQ, band.len_q), key, std::min(key + kBlockKv, band.len_kv)) !=
           Coverage::empty;
}

/// `segments`: of the launch; 0: those that the sequence alone needs. `more`: how many more key blocks a segment of
/// another sequence of the call has.
template <int kBlockQ, int kBlockKv>
void expect_right(const Mask& mask, int len_q, int len_kv, int group, int segments = 0, int more = 0) {
    BlockSchedule<kBlockQ, kBlockKv> schedule{};
    const int part_queries = QueryParts::fitting(group, QueryParts::kMaxTerms);
    schedule.set(mask, len_q, len_kv, group);
    if (segments == 0) segments = schedule.segmented ? cuda::kSegments : 1;
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len_q, len_kv, group, segments, more));
    Adders adders;
    for (int part = 0; part < QueryParts(len_q, part_queries * schedule.head_splits).count(); ++part) {
        BlockSchedule<kBlockQ, kBlockKv> of_part{};
        of_part.set(mask, len_q, len_kv, group);
        of_part.set_part(part, part_queries);
        const Adders own =
            of_part.ascending ? adders_of<true>(of_part, segments, more) : adders_of<false>(of_part, segments, more);
        for (const auto& [accumulator_and_block, blocks_of_keys] : own) {
            const auto [accumulator, m] = accumulator_and_block;
            ASSERT_GE(m * kBlockQ, of_part.first_query);
            ASSERT_LT(m * kBlockQ, of_part.end_query);
            for (std::size_t position = 0; position < blocks_of_keys.size(); ++position) {
                const int n = blocks_of_keys[position];
                ASSERT_EQ(of_part.position(accumulator, m, n), static_cast<int>(position))
                    << "accumulator " << accumulator << " of queries " << m << ", added to by keys " << n;
            }
        }
        adders.insert(own.begin(), own.end());
    }
    for (int m = 0; m < schedule.count_q; ++m) {
        for (int accumulator = 0; accumulator < 2; ++accumulator) {
            ASSERT_EQ(schedule.has_contributions(accumulator, m), adders.count({accumulator, m}) != 0)
                << "accumulator " << accumulator << " of queries " << m;
        }
        for (int n = 0; n < schedule.count_kv; ++n) {
            int times = 0;
            for (int accumulator = 0; accumulator < 2; ++accumulator) {
                const auto found = adders.find({accumulator, m});
                if (found != adders.end())
                    times += static_cast<int>(std::count(found->second.begin(), found->second.end(), n));
            }
            ASSERT_EQ(times, touches(mask, schedule, m, n) ? 1 : 0) << "queries " << m << ", keys " << n;
        }
    }
}

TEST(Fa3DqOrder, every_tile_is_added_once_and_in_the_order_of_the_positions) {
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

/// Sequences whose sums are too long for one accumulator (cuda/host/query_parts.hpp): 4 heads of 20,000 queries are two
/// parts, 64 of them twenty.
TEST(Fa3DqOrder, parts_of_a_long_sequence_are_added_in_the_order_of_the_positions) {
    for (const Mask& mask : kMasks) {
        expect_right<64, 128>(mask, 70'000, 500, 1);
        for (const int len_kv : {1, 200, 1500, 20'000}) {
            for (const int group : {4, 64}) {
                expect_right<64, 128>(mask, 20'000, len_kv, group);
                expect_right<128, 128>(mask, 20'000, len_kv, group);
                if (HasFatalFailure()) return;
            }
        }
    }
    for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {  // as many queries as keys
        const Mask mask{.causal = causal};
        expect_right<64, 128>(mask, 10'000, 10'000, 7);
        expect_right<128, 128>(mask, 10'000, 10'000, 7);
        expect_right<64, 128>(mask, 66'000, 66'000, 1, cuda::kSegments);
        if (HasFatalFailure()) return;
    }
    BlockSchedule<64, 128> schedule{};
    schedule.set({.causal = Causal::top_left}, 10'000, 10'000, 7);
    schedule.set_part(1, QueryParts::fitting(7, QueryParts::kMaxTerms));
    EXPECT_TRUE(schedule.ascending && schedule.has_parts() && !schedule.is_past_last_part());
    schedule.set({.causal = Causal::top_left}, 66'000, 66'000, 1);
    schedule.set_part(1, QueryParts::kMaxTerms);
    EXPECT_TRUE(schedule.segmented && schedule.has_parts() && !schedule.is_past_last_part());
    EXPECT_EQ(schedule.first_query, 65'536);
    EXPECT_EQ(schedule.end_query, 66'000);
    schedule.set({}, 70'000, 1500, 1);
    schedule.set_part(2, QueryParts::kMaxTerms);
    EXPECT_TRUE(schedule.is_past_last_part());
}

/// Sequences that are segmented, and those that are not, in one call.
TEST(Fa3DqOrder, blocks_in_segments_are_added_in_the_order_of_the_positions) {
    using cuda::kSegments;
    for (const Mask& mask : kMasks) {
        for (const int len : {1, 200, 2048, 2111, 4000, 4096, 4097, 5555}) {
            for (const int more : {0, 3}) {
                expect_right<64, 128>(mask, len, len, 1, kSegments, more);
                expect_right<128, 128>(mask, len, len, 1, kSegments, more);
            }
            expect_right<64, 128>(mask, len, len / 2 + 1, 1, kSegments);
            if (HasFatalFailure()) return;
        }
    }
}

/// Under a causal mask the segment with the longest blocks starts first. The key blocks of one sequence decide.
TEST(Fa3DqOrder, causal_blocks_of_many_heads_start_in_segments) {
    BlockSchedule<64, 128> schedule{};
    const Mask causal{.causal = Causal::top_left};
    schedule.set(causal, 4096, 4096, 1);
    ASSERT_TRUE(schedule.segmented);
    EXPECT_EQ(schedule.key_block(0, 0, 4, 8), 7);
    EXPECT_EQ(schedule.key_block(3, 7, 4, 8), 24);
    EXPECT_EQ(schedule.position(0, 63, 7), 0);
    EXPECT_EQ(schedule.position(0, 63, 31), 24);
    EXPECT_EQ(schedule.position(0, 63, 24), 31);
    for (const auto& [len_q, len_kv, group] :
         {std::array{4096, 4096, 2}, std::array{4096, 5000, 1}, std::array{3968, 3968, 1}}) {
        schedule.set(causal, len_q, len_kv, group);
        EXPECT_FALSE(schedule.segmented) << len_q << " " << len_kv << " " << group;
    }
    schedule.set({}, 4096, 4096, 1);
    EXPECT_FALSE(schedule.segmented);
}

/// Without a mask few key blocks start together, with one accumulator. Many key blocks, and those of groups, do not.
TEST(Fa3DqOrder, few_blocks_without_a_mask_start_at_the_first_queries) {
    using cuda::fa3::backward::kMaxAlignedBlocks;
    BlockSchedule<64, 128> schedule{};
    schedule.set({}, 1000, 128 * kMaxAlignedBlocks, 1);
    for (int n = 0; n < schedule.count_kv; ++n) ASSERT_EQ(schedule.first_query_block(n), 0);
    for (int m = 0; m < schedule.count_q; ++m) ASSERT_FALSE(schedule.has_contributions(1, m));
    EXPECT_EQ(schedule.position(0, 3, kMaxAlignedBlocks - 1), 0);
    EXPECT_EQ(schedule.position(0, 3, 0), kMaxAlignedBlocks - 1);
    schedule.set({}, 1000, 128 * kMaxAlignedBlocks + 1, 1);
    EXPECT_TRUE(schedule.has_contributions(1, 0));
    schedule.set({}, 1000, 1000, 2);
    EXPECT_TRUE(schedule.has_contributions(1, 0));
}

/// If first_block_adds_last() says so, the first block of the head or of its segment is the last to add to all of dQ.
TEST(Fa3DqOrder, the_first_block_adds_last_where_it_is_said_to) {
    using cuda::kSegments;
    int said = 0;
    for (const Mask& mask : kMasks) {
        for (const int len_q : {1, 128, 200, 640, 1000, 2048, 2049, 4096}) {
            for (const int len_kv : {1, 128, 200, 640, 1000, 2048, 2049, 4096}) {
                for (const int group : {1, 8}) {
                    BlockSchedule<64, 128> schedule{};
                    schedule.set(mask, len_q, len_kv, group);
                    if (!schedule.first_block_adds_last()) continue;
                    SCOPED_TRACE(describe(mask, 64, 128, len_q, len_kv, group, schedule.segmented ? kSegments : 1));
                    ++said;
                    const Adders adders = adders_of<false>(schedule, schedule.segmented ? kSegments : 1, 0);
                    for (int m = 0; m < schedule.count_q; ++m) {
                        const auto found = adders.find({0, m});
                        ASSERT_TRUE(found != adders.end() && adders.count({1, m}) == 0) << m;
                        const int n = found->second.back();
                        ASSERT_EQ(n, schedule.segment_begin(n)) << m;
                        ASSERT_EQ(schedule.position(0, m, n) + 1, schedule.key_blocks_of(m).end) << m;
                    }
                }
            }
        }
    }
    EXPECT_GT(said, 50);
}

/// An ascending key block goes through all heads of the group at each query block.
TEST(Fa3DqOrder, heads_of_a_group_stay_together_where_blocks_ascend) {
    BlockSchedule<64, 128> schedule{};
    schedule.set({.causal = Causal::bottom_right}, 1024, 1024, 4);
    ASSERT_TRUE(schedule.ascending);
    StepIterator<true> step(schedule, 3, 4);
    for (int m = 15; m >= 6; --m) {
        for (int left = 4; left > 0; --left, step.advance(4)) {
            ASSERT_TRUE(step.more());
            ASSERT_EQ(step.m, m);
            ASSERT_EQ(step.heads_left, left);
            ASSERT_EQ(step.accumulator, 0);
        }
    }
    ASSERT_FALSE(step.more());
}

/// Each block is a segment, so that heads take turns: the longest blocks of all heads start first, or, in descending
/// order, the last blocks.
TEST(Fa3DqOrder, single_blocks_in_turn_are_added_in_the_order_of_the_positions) {
    for (const Mask& mask : kMasks) {
        for (const int len : {1, 200, 640, 2049}) {
            const int count = (len + 127) / 128;
            for (const int more : {0, 3}) {
                expect_right<64, 128>(mask, len, len, 8, count + more);
                expect_right<128, 128>(mask, len, len, 8, count + more);
                expect_right<64, 128>(mask, len / 2 + 1, len, 8, count + more);
            }
            if (HasFatalFailure()) return;
        }
    }
}

/// Few causal key blocks split their query heads, so that no block lasts too long. The sequence's length and the size
/// of a group decide.
TEST(Fa3DqOrder, few_causal_blocks_of_groups_split_the_query_heads) {
    using cuda::EvenHeadSplit;
    const Mask causal{.causal = Causal::bottom_right};
    BlockSchedule<64, 128> schedule{};
    const auto splits = [&](int len, int group) {
        schedule.set(causal, len, len, group);
        EXPECT_EQ(schedule.head_splits * schedule.heads_per_split, group) << len;
        EXPECT_TRUE(schedule.ascending);
        EXPECT_LE(schedule.head_splits, EvenHeadSplit::max_splits(causal, group, len, 128)) << len;
        return schedule.head_splits;
    };
    EXPECT_EQ(splits(2048, 8), 4) << "two heads each";
    EXPECT_EQ(splits(32768, 8), 2) << "no more than four heads at a stop";
    EXPECT_EQ(splits(32768, 4), 1) << "256 blocks";
    EXPECT_EQ(splits(2048, 4), 2);
    EXPECT_EQ(splits(8192, 2), 1) << "one head each would be too few";
    EXPECT_EQ(splits(1024, 4), 1) << "64 steps";
    EXPECT_EQ(splits(512, 8), 1) << "64 steps";
    EXPECT_EQ(splits(4096, 64), 16);
    EXPECT_EQ(splits(4096, 6), 2) << "three heads are an odd number";
    EXPECT_EQ(splits(4096, 7), 1);
    for (int len = 1; len < 9000; len += 37) splits(len, 16);
    EXPECT_EQ(EvenHeadSplit::max_splits(causal, 1, 4096, 128), 1);
    EXPECT_EQ(EvenHeadSplit::max_splits({}, 8, 4096, 128), 1);
    for (const auto& [mask, len_q] : {std::pair{Mask{}, 2048}, {causal, 2047}, {Mask{.window_right = 5}, 2048}}) {
        schedule.set(mask, len_q, 2048, 8);
        EXPECT_EQ(schedule.head_splits, 1);
        EXPECT_EQ(schedule.heads_per_split, 8);
    }
}

/// unmasked_query_blocks() are all query blocks that see all keys of a warpgroup, and no others.
template <int kBlockQ, int kBlockKv>
void expect_full(const Mask& mask, int len_q, int len_kv) {
    constexpr int kKeys = 64;
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len_q, len_kv, 1, 1));
    BlockSchedule<kBlockQ, kBlockKv> schedule{};
    schedule.set(mask, len_q, len_kv, 1);
    const Band band = mask.bind(len_q, len_kv);
    for (int key = 0; key < schedule.count_kv * kBlockKv; key += kKeys) {
        const auto [begin, end] = schedule.unmasked_query_blocks(key, kKeys);
        for (int m = 0; m < schedule.count_q; ++m) {
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
void expect_one_accumulator(const Mask& mask, int len, int group) {
    SCOPED_TRACE(describe(mask, kBlockQ, kBlockKv, len, len, group, 1000));
    BlockSchedule<kBlockQ, kBlockKv> schedule{};
    schedule.set(mask, len, len, group);
    for (int m = 0; m < schedule.count_q; ++m) ASSERT_FALSE(schedule.has_contributions(1, m)) << "queries " << m;
}

TEST(Fa3DqOrder, one_accumulator_is_enough_where_the_workspace_has_one) {
    for (const Mask& mask : kMasks) {
        for (const int len : kLengths) {
            for (const int group : {1, 4}) {
                const Problem p{.len_q = len, .len_kv = len, .heads_q = group, .heads_kv = 1, .mask = mask};
                if (cuda::fa3::backward::dq_accumulators(p) == 2) continue;
                expect_one_accumulator<64, 128>(mask, len, group);
                expect_one_accumulator<128, 128>(mask, len, group);
            }
        }
    }
}

TEST(Fa3DqOrder, blocks_without_a_mask_start_apart) {
    BlockSchedule<64, 128> schedule{};
    schedule.set({}, 4096, 4096, 1);
    for (int n = 0; n < schedule.count_kv; ++n) ASSERT_EQ(StepIterator<false>(schedule, n, 1).m, 2 * n);
    BlockSchedule<128, 128> square{};
    square.set({}, 4096, 4096, 1);
    for (int n = 0; n < square.count_kv; ++n) ASSERT_EQ(StepIterator<false>(square, n, 1).m, n);
}

}  // namespace
}  // namespace tessera::check::fa3_dq_order_test
