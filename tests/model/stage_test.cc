// SPDX-License-Identifier: Apache-2.0
//
// Thread blocks as the model assigns them: the tiles that a mask or an end cuts, the time of all blocks, and key blocks
// that add to dQ in a fixed order.
#include "model/stage.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/property.hpp"
#include "model/deal.hpp"
#include "schedule/grid.hpp"

namespace tessera::model::stage_test {
namespace {

Problem any_problem() {
    Problem p = Problem::dense(*rc::gen::inRange(1, 4), 1, *rc::gen::inRange(1, 4), 64, DType::bf16);
    p.len_q = *rc::gen::inRange<std::int64_t>(1, 900);
    p.len_kv = *rc::gen::inRange<std::int64_t>(1, 900);
    p.heads_kv = p.heads_q;
    p.heads_q *= *rc::gen::inRange(1, 4);
    p.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right, Causal::top_left);
    if (*rc::gen::inRange(0, 2) == 0) p.mask.window_left = *rc::gen::inRange<std::int64_t>(0, 500);
    return p;
}

Tile any_tile() { return {*rc::gen::element(16, 64, 128), *rc::gen::element(32, 80, 128)}; }

std::int64_t size_of(const Range& range) { return range.size(); }

TEST(Grid, uncut_tiles_are_the_full_ones) {
    EXPECT_TRUE(test::holds(300, [] {
        const Problem p = any_problem();
        const schedule::Grid grid{p.mask.bind(p.len_q, p.len_kv), any_tile(), false};
        const auto full = [&](std::int64_t i, std::int64_t j) {
            const Range q = grid.queries(i);
            return grid.band.coverage(q.begin, q.end, j * grid.block.block_kv, (j + 1) * grid.block.block_kv) ==
                   Coverage::full;
        };
        for (std::int64_t i = 0; i < grid.rows(); ++i) {
            std::int64_t count = 0, without_ends = 0;
            for (std::int64_t j = 0; j < grid.columns(); ++j) {
                const Range q = grid.queries(i), k = grid.keys(j);
                count += full(i, j) ? 1 : 0;
                without_ends += grid.band.coverage(q.begin, q.end, k.begin, k.end) == Coverage::full ? 1 : 0;
            }
            RC_ASSERT(size_of(grid.uncut_columns(i)) == count);
            RC_ASSERT(size_of(grid.uncut_columns(i, false)) == without_ends);
        }
        for (std::int64_t j = 0; j < grid.columns(); ++j) {
            std::int64_t count = 0;
            for (std::int64_t i = 0; i < grid.rows(); ++i)
                count += full(i, j) && (i + 1) * grid.block.block_q <= p.len_q ? 1 : 0;
            RC_ASSERT(size_of(grid.uncut_rows(j)) == count);
        }
    }));
}

/// An order of additions, and the time of each addition, never shorten the time of the same blocks without an order.
TEST(ClocksInDqOrder, additions_only_add_time) {
    EXPECT_TRUE(test::holds(100, [] {
        const Problem p = any_problem();
        Stage stage{.problem = p, .sequences = {}, .tile = {64, 128}};
        stage.rows_outer = false;
        stage.whole_groups = true;
        stage.order = Order::last_first;
        stage.step = 3, stage.mask = 2, stage.ends = 10;
        stage.fa3_dq_order = *rc::gen::arbitrary<bool>();
        const int multiprocessors = *rc::gen::inRange(1, 9);
        const std::vector<double> blocks = blocks_in_order(stage);
        const double sum = std::accumulate(blocks.begin(), blocks.end(), 0.0);
        const double free = clocks_in_dq_order(stage, multiprocessors);
        RC_ASSERT(free >= sum / multiprocessors - 1e-9);
        // Otherwise a group's heads are split, the first blocks begin, or heads alternate (few blocks without a mask).
        const bool as_listed = p.group() == 1 && (!stage.fa3_dq_order || !p.mask.trivial());
        if (as_listed) RC_ASSERT(free >= dealt(blocks, {multiprocessors, 1, 1}) - 1e-9);
        stage.dq_add = 5;
        RC_ASSERT(clocks_in_dq_order(stage, multiprocessors) >= free - 1e-9);
    }));
}

/// One tile of queries and seven blocks of keys on eight multiprocessors, by hand: all are ready after half of their
/// ends and one step, add one after the other, and the last one has the other half of its ends to go.
TEST(ClocksInDqOrder, few_queries_and_many_keys) {
    Problem p = Problem::dense(1, 64, 1, 64, DType::bf16);
    p.len_kv = 7 * 128;
    Stage stage{.problem = p, .sequences = {}, .tile = {64, 128}};
    stage.rows_outer = false;
    stage.whole_groups = true;
    stage.step = 3, stage.ends = 10, stage.dq_add = 100;
    stage.fa3_dq_order = true;  // on one multiprocessor each begins when the one before has added and ended
    for (const int multiprocessors : {1, 8})
        EXPECT_DOUBLE_EQ(clocks_in_dq_order(stage, multiprocessors), 5 + 3 + 6 * 100 + 5);
    stage.fa3_dq_order = false;  // block 0 lies along with these queries and has an accumulator of its own
    EXPECT_DOUBLE_EQ(clocks_in_dq_order(stage, 8), 5 + 3 + 5 * 100 + 5);
    EXPECT_DOUBLE_EQ(clocks_in_dq_order(stage, 1), 5 + 3 + 5 * 100 + 5 + 13);
}

constexpr int kMultiprocessors = 132;

/// The blocks of keys of a backward, the longest of all heads first.
Stage longest_first(const Problem& p) {
    Stage stage{.problem = p, .sequences = {}, .tile = {64, 128}};
    stage.rows_outer = false;
    stage.whole_groups = true;
    stage.order = Order::last_first;
    stage.step = 1, stage.ends = 1.5;
    return stage;
}

/// Under a causal mask fa2's longest blocks begin first where there are many: the last ones are short.
TEST(ClocksInDqOrder, long_blocks_begin_first) {
    Problem p = Problem::dense(4, 4096, 16, 128, DType::bf16);
    p.mask.causal = Causal::bottom_right;
    Stage stage = longest_first(p);
    const std::vector<double> blocks = blocks_in_order(stage);
    const double share = std::accumulate(blocks.begin(), blocks.end(), 0.0) / kMultiprocessors;
    EXPECT_GT(dealt(blocks, {kMultiprocessors, 1, 1}), 1.05 * share);
    EXPECT_LT(clocks_in_dq_order(stage, kMultiprocessors), 1.03 * share);
    p.len_q = 4095;  // not as many queries as keys: one head's blocks after another's
    EXPECT_GT(clocks_in_dq_order(stage, kMultiprocessors), 1.05 * share);
}

/// With eight kv heads of 16 blocks, 132 multiprocessors wait for the longest block, which takes twice the mean, unless
/// a group's query heads are split.
TEST(ClocksInDqOrder, groups_are_shared_out) {
    Problem p = Problem::dense(1, 2048, 64, 128, DType::bf16);
    p.heads_kv = 8;
    p.mask.causal = Causal::bottom_right;
    Stage stage = longest_first(p);
    const std::vector<double> blocks = blocks_in_order(stage);
    const double share = std::accumulate(blocks.begin(), blocks.end(), 0.0) / kMultiprocessors;
    EXPECT_GT(dealt(blocks, {kMultiprocessors, 1, 1}), 1.8 * share);
    for (const bool of_fa3 : {true, false}) {
        stage.fa3_dq_order = of_fa3;
        EXPECT_LT(clocks_in_dq_order(stage, kMultiprocessors), 1.4 * share);
        EXPECT_GT(clocks_in_dq_order(stage, kMultiprocessors), share);
    }
}

/// Two tiles side by side: an odd one takes as long as two.
TEST(Stage, parts_of_heads) {
    const Problem p = Problem::dense(1, 5 * 64, 1, 64, DType::bf16);
    Stage stage{.problem = p, .sequences = {}, .tile = {64, 64}};
    stage.whole_heads = true;
    stage.together = 2;
    stage.step = 1;
    EXPECT_EQ(blocks_in_order(stage), std::vector<double>{30});
    stage.parts = 2;
    EXPECT_EQ(blocks_in_order(stage), (std::vector<double>{20, 10}));
}

}  // namespace
}  // namespace tessera::model::stage_test
