// SPDX-License-Identifier: Apache-2.0
//
// fa3's choice between two shapes by a model of its queue (src/cuda/fa3/queue_time.hpp), beside the queue simulated
// tile by tile.
#include "cuda/fa3/queue_time.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/fa3/shapes.hpp"
#include "cuda/fa3/tile_order.hpp"

namespace tessera::queue_time_test {
namespace {

using cuda::fa3::Config;
using cuda::fa3::HeadDim64Short;
using cuda::fa3::HeadTime;
using cuda::fa3::kTileOf128;
using cuda::fa3::kTileOf192;
using cuda::fa3::queue_decides;
using cuda::fa3::queue_time;
using cuda::fa3::TileOrder;
using cuda::fa3::TilePrice;
using cuda::fa3::wants_short;

Problem causal(std::int64_t heads, std::int64_t len, std::int64_t batch = 1) {
    Problem p = Problem::dense(batch, len, heads, 64, DType::bf16);
    p.mask.causal = Causal::bottom_right;
    return p;
}

/// Whoever is free takes the next tile.
double simulated(const Problem& p, const TilePrice& price, int workers = cuda::fa3::kMultiprocessors) {
    const HeadTime head(p, price);
    const auto heads = static_cast<int>(p.batch * p.heads_q);
    const TileOrder order(heads, head.tiles(), heads);
    std::vector<double> free_at(static_cast<std::size_t>(workers), 0.0);
    for (int tile = 0; tile < order.tiles(); ++tile) {
        *std::min_element(free_at.begin(), free_at.end()) += head[head.tiles() - 1 - order[tile].block];
    }
    return *std::max_element(free_at.begin(), free_at.end());
}

/// Some call of few heads, causal or not: of keys as many as queries, or more, or fewer. The same ones by any compiler:
/// each number is drawn in a statement of its own.
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

TEST(QueueTime, IsNotAskedOfMoreTilesThanCanBeCounted) {
    constexpr std::int64_t kHuge = std::int64_t{1} << 40;
    for (const auto& [heads, len] : {std::pair{kHuge, kHuge}, {kHuge, std::int64_t{1} << 31}, {2, kHuge}})
        EXPECT_FALSE(queue_decides(causal(heads, len), kTileOf192)) << heads << " x " << len;
    EXPECT_TRUE(queue_decides(causal(1, 8192), kTileOf192));
}

TEST(QueueTime, IsNearTheQueueTileByTile) {
    std::mt19937 random(5);
    int asked = 0;
    for (int i = 0; i < 2000; ++i) {
        const Problem p = drawn(random);
        if (!queue_decides(p, kTileOf192)) continue;
        ++asked;
        for (const TilePrice& price : {kTileOf192, kTileOf128}) {
            const double right = simulated(p, price);
            EXPECT_LE(queue_time(p, price), right * 1.000001) << p.describe();
            EXPECT_GE(queue_time(p, price), 0.85 * right) << p.describe();
        }
    }
    EXPECT_GT(asked, 200);
}

/// Is a call's tile chosen by the model? That of a short row goes by a rule that was measured in such rows.
bool chosen_by_queue(const Problem& p) {
    const Config c = HeadDim64Short::kConfig;
    return p.len_kv > (p.mask.trivial() ? c.short_even_row : c.short_row) && queue_decides(p, kTileOf192);
}

TEST(QueueTime, NoCallLosesByTheChoice) {
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

TEST(QueueTime, OfOneRoundIsTheLongestTile) {
    EXPECT_DOUBLE_EQ(queue_time(causal(1, 8192), kTileOf192), 64 * kTileOf192.block + kTileOf192.ends);
    EXPECT_DOUBLE_EQ(queue_time(causal(2, 8192), kTileOf128), 64 * kTileOf128.block + kTileOf128.ends);
}

TEST(QueueTime, CountsAllWorkWhereTilesAreMany) {
    const Problem p = causal(64, 4096);
    const HeadTime head(p, kTileOf192);
    double work = 0;
    for (int i = 0; i < head.tiles(); ++i) work += head[i];
    EXPECT_DOUBLE_EQ(queue_time(p, kTileOf192), 64 * work / cuda::fa3::kMultiprocessors);
}

/// The case that was measured: 102 microseconds by tiles of 192 queries, 76 by tiles of 128.
TEST(QueueTime, OfThreeHeadsIsAsMeasured) {
    const Problem p = causal(3, 8192);
    constexpr double kLaunch = 4;  // microseconds of any call
    EXPECT_NEAR(queue_time(p, kTileOf192) + kLaunch, 102, 2);
    EXPECT_NEAR(queue_time(p, kTileOf128) + kLaunch, 76, 2);
    EXPECT_NEAR(queue_time(p, kTileOf192), simulated(p, kTileOf192), 1e-9);
    EXPECT_NEAR(queue_time(p, kTileOf128), simulated(p, kTileOf128), 1e-9);
}

TEST(QueueTime, DecidesForRowsOfFewHeadsOnly) {
    EXPECT_TRUE(wants_short(causal(1, 32768)));
    EXPECT_TRUE(wants_short(causal(3, 8192)));
    EXPECT_TRUE(wants_short(causal(1, 8192, 3))) << "members are heads, too";
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

}  // namespace
}  // namespace tessera::queue_time_test
