// SPDX-License-Identifier: Apache-2.0
//
// Tests the parts of the fixed order of dQ that fa3's backward and gradient share (cuda/backward/host/dq_order.hpp).
// fa3_dq_order_test and gradient_dq_order_test test the orders themselves. No GPU is needed.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/backward/host/dq_order.hpp"

namespace tessera::check::dq_order_test {
namespace {

using cuda::Band32;
using cuda::QueryVisits;

TEST(DqOrder, visits_go_from_the_start_to_the_end_and_then_from_the_first_block) {
    const QueryVisits visits({2, 7}, 5);
    ASSERT_EQ(visits.count(), 5);
    const std::vector<int> blocks{5, 6, 2, 3, 4};
    for (int i = 0; i < visits.count(); ++i) {
        const int accumulator = i < 2 ? 0 : 1;
        EXPECT_EQ(visits.query_block_of(i), blocks[static_cast<std::size_t>(i)]) << "visit " << i;
        EXPECT_EQ(visits.accumulator_of(i), accumulator) << "visit " << i;
        EXPECT_TRUE(visits.adds_to(accumulator, visits.query_block_of(i))) << "visit " << i;
        EXPECT_FALSE(visits.adds_to(1 - accumulator, visits.query_block_of(i))) << "visit " << i;
    }
    for (const int m : {1, 7}) EXPECT_FALSE(visits.adds_to(0, m) || visits.adds_to(1, m)) << "query block " << m;
}

TEST(DqOrder, a_start_outside_of_the_visited_blocks_is_moved_to_their_ends) {
    EXPECT_EQ(QueryVisits({2, 7}, 0).start, 2);
    EXPECT_EQ(QueryVisits({2, 7}, 9).start, 7) << "all visits are of accumulator 1";
    EXPECT_EQ(QueryVisits({2, 7}, 9).accumulator_of(0), 1);
    EXPECT_EQ(QueryVisits({0, 0}, 3).count(), 0);
}

TEST(DqOrder, only_a_causal_mask_alone_over_as_many_queries_as_keys_is_a_causal_square) {
    const auto is_square = [](const Mask& mask, int len_q, int len_kv) {
        const Band band = mask.bind(len_q, len_kv);
        const bool square = cuda::is_causal_square(band);
        EXPECT_EQ(cuda::is_causal_square(Band32(band), len_q, len_kv), square) << len_q << " " << len_kv;
        return square;
    };
    const Mask causal{.causal = Causal::bottom_right};
    EXPECT_TRUE(is_square(causal, 100, 100));
    EXPECT_FALSE(is_square(causal, 100, 101));
    EXPECT_FALSE(is_square({}, 100, 100));
    EXPECT_FALSE(is_square({.causal = Causal::bottom_right, .window_left = 50}, 100, 100));
}

}  // namespace
}  // namespace tessera::check::dq_order_test
