// SPDX-License-Identifier: Apache-2.0
//
// The elements of S that the CPU's kernels compute, counted by hand: they fill up ends and edges.
#include <gtest/gtest.h>

#include "model/cpu.hpp"

namespace tessera::model {
namespace {

schedule::Workload workload(Pass pass, std::int64_t len_q, std::int64_t len_kv, Causal causal = Causal::none) {
    Problem p;
    p.heads_q = p.heads_kv = 3;
    p.len_q = len_q, p.len_kv = len_kv;
    p.head_dim = p.head_dim_v = 64;
    p.mask.causal = causal;
    return {.problem = p, .schedule = Schedule::fa2, .pass = pass, .tile = {64, 64}};
}

TEST(ComputedElements, the_last_queries_fill_16_lanes) {
    EXPECT_EQ(computed_elements(workload(Pass::forward, 65, 100), false), 3 * (64 + 16) * 100);
    EXPECT_EQ(computed_elements(workload(Pass::backward, 98, 328), false), 3 * (64 + 48) * 328);
    EXPECT_EQ(computed_elements(workload(Pass::forward, 1, 4000), false), 3 * 16 * 4000);
}

TEST(ComputedElements, a_cut_tile_in_lanes_counts_to_the_last_key_that_is_seen) {
    EXPECT_EQ(computed_elements(workload(Pass::forward, 100, 100, Causal::bottom_right), false),
              3 * (64 * 64 + 48 * 100));
    EXPECT_EQ(computed_elements(workload(Pass::backward, 100, 100, Causal::bottom_right), false),
              3 * (64 * 64 + 48 * 100));
}

TEST(ComputedElements, tiles_of_a_matrix_unit_are_filled_with_keys_too) {
    EXPECT_EQ(computed_elements(workload(Pass::forward, 65, 100), true), 3 * (64 + 16) * 128);
    EXPECT_EQ(computed_elements(workload(Pass::backward, 65, 100), true), 3 * 96 * 128);
    EXPECT_EQ(computed_elements(workload(Pass::backward, 64, 64, Causal::bottom_right), true), 3 * 3 * 32 * 32);
}

TEST(ComputedElements, nothing_of_no_queries_or_keys) {
    EXPECT_EQ(computed_elements(workload(Pass::forward, 0, 100), false), 0);
    EXPECT_EQ(computed_elements(workload(Pass::backward, 100, 0), true), 0);
}

}  // namespace
}  // namespace tessera::model
