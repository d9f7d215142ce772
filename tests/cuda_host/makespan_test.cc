// SPDX-License-Identifier: Apache-2.0
//
// fa3's choice between two shapes by a model of its queue (src/cuda/fa3/host/makespan.hpp), beside the queue simulated
// tile by tile.
#include "cuda/fa3/host/makespan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/fa3/host/tile_order.hpp"

namespace tessera::makespan_test {
namespace {

using cuda::fa3::Config;
using cuda::fa3::HeadDim64Short;
using cuda::fa3::HeadTileTimes;
using cuda::fa3::kShortCall;
using cuda::fa3::kShortTileOf128;
using cuda::fa3::kShortTileOf192;
using cuda::fa3::kTileOf128;
using cuda::fa3::kTileOf192;
using cuda::fa3::makespan;
using cuda::fa3::makespan_decides;
using cuda::fa3::TileCost;
using cuda::fa3::TileOrder;
using cuda::fa3::wants_short;

Problem causal(std::int64_t heads, std::int64_t len, std::int64_t batch = 1) {
    Problem p = Problem::dense(batch, len, heads, 64, DType::bf16);
    p.mask.causal = Causal::bottom_right;
    return p;
}

/// The makespan of a simulation in which a free multiprocessor takes the next tile.
double simulated(const Problem& p, const TileCost& price, int workers = cuda::fa3::kMultiprocessors) {
    const HeadTileTimes head(p, price);
    const auto heads = static_cast<int>(p.batch * p.heads_q);
    const TileOrder order(heads, head.tiles(), heads);
    std::vector<double> free_at(static_cast<std::size_t>(workers), 0.0);
    for (int tile = 0; tile < order.tiles(); ++tile) {
        *std::min_element(free_at.begin(), free_at.end()) += head[head.tiles() - 1 - order[tile].block];
    }
    return *std::max_element(free_at.begin(), free_at.end());
}

/// A random call of few heads, causal or not, with as many keys as queries, or more, or fewer. It does not depend on
/// the compiler, since each number is drawn in a separate statement.
Problem drawn(std::mt19937& random) {
    const std::int64_t longest = random() % 2 == 0 ? 3000 : 32000;
    const std::int64_t heads = 1 + random() % 12;
    const std::int64_t len = 65 + random() % (longest - 65);
    const std::int64_t batch = 1 + random() % 2;
    Problem p = causal(heads, len, batch);
    if (random() % 3 == 0) p.len_q = 1 + static_cast<std::int64_t>(random()) % (2 * p.len_kv);
    if (random() % 3 == 0) p.mask.causal = Causal::top_left;
    if (random() % 3 == 0) p.mask = {};
    return p;
}

TEST(Makespan, is_not_asked_of_more_tiles_than_can_be_counted) {
    constexpr std::int64_t kHuge = std::int64_t{1} << 40;
    for (const auto& [heads, len] : {std::pair{kHuge, kHuge}, {kHuge, std::int64_t{1} << 31}, {2, kHuge}})
        EXPECT_FALSE(makespan_decides(causal(heads, len), kTileOf192)) << heads << " x " << len;
    EXPECT_TRUE(makespan_decides(causal(1, 8192), kTileOf192));
}

TEST(Makespan, is_near_the_queue_tile_by_tile) {
    std::mt19937 random(5);
    int asked = 0;
    for (int i = 0; i < 2000; ++i) {
        const Problem p = drawn(random);
        if (!makespan_decides(p, kTileOf192)) continue;
        ++asked;
        for (const TileCost& price : {kTileOf192, kTileOf128}) {
            const double right = simulated(p, price);
            EXPECT_LE(makespan(p, price), right * 1.000001) << p.describe();
            EXPECT_GE(makespan(p, price), 0.85 * right) << p.describe();
        }
    }
    EXPECT_GT(asked, 200);
}

/// Does the model choose a call's tile? For short rows a measured rule does.
bool chosen_by_queue(const Problem& p) {
    const Config c = HeadDim64Short::kConfig;
    return p.len_kv > (p.mask.trivial() ? c.short_even_row : c.short_row) && makespan_decides(p, kTileOf192);
}

TEST(Makespan, no_call_loses_by_the_choice) {
    std::mt19937 random(6);
    int wanted = 0;
    for (int i = 0; i < 4000; ++i) {
        const Problem p = drawn(random);
        if (!chosen_by_queue(p) || !wants_short(p)) continue;
        ++wanted;
        EXPECT_LE(simulated(p, kTileOf128), 1.01 * simulated(p, kTileOf192)) << p.describe();
    }
    EXPECT_GT(wanted, 100);
}

TEST(Makespan, of_one_round_is_the_longest_tile) {
    EXPECT_DOUBLE_EQ(makespan(causal(1, 8192), kTileOf192), 64 * kTileOf192.block + kTileOf192.ends);
    EXPECT_DOUBLE_EQ(makespan(causal(2, 8192), kTileOf128), 64 * kTileOf128.block + kTileOf128.ends);
}

TEST(Makespan, counts_all_work_where_tiles_are_many) {
    const Problem p = causal(64, 4096);
    const HeadTileTimes head(p, kTileOf192);
    double work = 0;
    for (int i = 0; i < head.tiles(); ++i) work += head[i];
    EXPECT_DOUBLE_EQ(makespan(p, kTileOf192), 64 * work / cuda::fa3::kMultiprocessors);
}

/// The measured case: 102 microseconds by tiles of 192 queries, 76 by tiles of 128.
TEST(Makespan, of_three_heads_is_as_measured) {
    const Problem p = causal(3, 8192);
    constexpr double kLaunch = 4;  // microseconds of any call
    EXPECT_NEAR(makespan(p, kTileOf192) + kLaunch, 102, 2);
    EXPECT_NEAR(makespan(p, kTileOf128) + kLaunch, 76, 2);
    EXPECT_NEAR(makespan(p, kTileOf192), simulated(p, kTileOf192), 1e-9);
    EXPECT_NEAR(makespan(p, kTileOf128), simulated(p, kTileOf128), 1e-9);
}

TEST(Makespan, decides_for_rows_of_few_heads_only) {
    EXPECT_TRUE(wants_short(causal(1, 32768)));
    EXPECT_TRUE(wants_short(causal(3, 8192)));
    EXPECT_TRUE(wants_short(causal(1, 8192, 3))) << "sequences are heads, too";
    EXPECT_TRUE(wants_short(causal(6, 4096)));
    EXPECT_FALSE(wants_short(causal(32, 16384)));
    EXPECT_FALSE(wants_short(causal(12, 8192)));
    EXPECT_TRUE(wants_short(causal(3, 1024))) << "a short row";
    EXPECT_TRUE(wants_short(causal(3, 2048)));
    EXPECT_TRUE(wants_short(causal(12, 2048)));
    EXPECT_FALSE(wants_short(causal(24, 2048))) << "two tiles of each multiprocessor";
    Problem p = causal(3, 8192);
    p.mask.window_left = 1024;
    EXPECT_FALSE(wants_short(p));
    p.mask = {};
    EXPECT_FALSE(wants_short(p)) << "129 tiles of 192 queries are one round, 192 of 128 are two";
    p.batch = 4;
    p.heads_q = p.heads_kv = 1;
    EXPECT_TRUE(wants_short(p)) << "two rounds either way";
    p = causal(3, 8192);
    p.ragged = true;
    p.total_q = p.total_kv = 8192;
    EXPECT_FALSE(wants_short(p)) << "lengths are not known";
    p = causal(3, 8192);
    p.len_q = 4096;
    EXPECT_FALSE(wants_short(p)) << "all tiles are long";
    p.len_q = 30;
    EXPECT_FALSE(wants_short(p)) << "few queries";
    p.len_q = 0;
    EXPECT_FALSE(wants_short(p));
}

struct Measured {
    std::int64_t batch, heads, len_q, len_kv;
    bool causal;
    double of_192, of_128;  ///< microseconds
};

Problem problem_of(const Measured& m) {
    Problem p = Problem::dense(m.batch, m.len_q, m.heads, 64, DType::bf16);
    p.len_kv = m.len_kv;
    if (m.causal) p.mask.causal = Causal::bottom_right;
    return p;
}

/// Calls of short rows, by tiles of 192 and of 128 queries: those that a rule by lengths alone served worst, and those
/// in which tiles of 192 win. (H200, cold L2, medians of eleven in one process.)
TEST(Makespan, short_rows_get_the_tile_that_won_by_measurement) {
    for (const Measured& m : {Measured{10, 8, 960, 128, false, 25.0, 17.6},
                              {8, 8, 960, 64, false, 22.8, 16.9},
                              {20, 12, 300, 128, false, 24.6, 19.1},
                              {18, 4, 960, 128, false, 22.2, 17.3},
                              {61, 1, 1500, 64, false, 26.9, 21.3},
                              {7, 12, 700, 256, false, 25.6, 21.1},
                              {174, 1, 384, 384, true, 28.9, 24.2},
                              {6, 12, 654, 197, false, 25.2, 21.4},
                              {16, 4, 960, 512, false, 34.5, 29.7},
                              {60, 8, 128, 128, false, 22.8, 16.2},
                              {5, 16, 400, 384, false, 23.0, 20.5},
                              {30, 8, 156, 256, true, 21.9, 24.1},
                              {8, 16, 931, 1000, true, 64.6, 70.3},
                              {78, 4, 300, 300, false, 40.7, 44.2},
                              {2, 12, 654, 354, false, 15.7, 16.5},
                              {15, 32, 181, 337, false, 39.3, 45.3},
                              {24, 8, 306, 1002, true, 48.7, 58.5}}) {
        const Problem p = problem_of(m);
        EXPECT_EQ(wants_short(p), m.of_128 < m.of_192) << p.describe();
        EXPECT_NEAR(kShortCall + makespan(p, kShortTileOf192), m.of_192, 0.25 * m.of_192) << p.describe();
        EXPECT_NEAR(kShortCall + makespan(p, kShortTileOf128), m.of_128, 0.25 * m.of_128) << p.describe();
    }
}

TEST(Makespan, short_rows_of_many_tiles_go_by_their_number) {
    EXPECT_TRUE(wants_short(problem_of({1024, 1, 512, 512, false, 0, 0})));
    EXPECT_FALSE(wants_short(problem_of({1024, 1, 960, 384, false, 0, 0}))) << "5 tiles of 192, 8 of 128";
    constexpr std::int64_t kHuge = std::int64_t{1} << 40;
    EXPECT_TRUE(wants_short(problem_of({kHuge, kHuge, 512, 512, false, 0, 0})));
    EXPECT_TRUE(wants_short(problem_of({8, 8, 0, 384, false, 0, 0})));
    EXPECT_TRUE(wants_short(problem_of({0, 8, 384, 384, false, 0, 0})));
    Problem p = problem_of({78, 4, 300, 300, false, 0, 0});
    p.mask.causal = Causal::bottom_right;
    p.mask.window_left = 500;
    EXPECT_TRUE(wants_short(p)) << "windows were not measured";
}

}  // namespace
}  // namespace tessera::makespan_test
