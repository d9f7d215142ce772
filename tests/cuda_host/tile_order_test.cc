// SPDX-License-Identifier: Apache-2.0
//
// The order of fa3's tile scheduler (src/cuda/fa3/host/tile_order.hpp), and a model of how well it fills a GPU.
#include "cuda/fa3/host/tile_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <random>
#include <vector>

namespace tessera::tile_order_test {
namespace {

using cuda::Divider;
using cuda::fa3::next_rotation;
using cuda::fa3::row_block_of;
using cuda::fa3::TileIndex;
using cuda::fa3::TileOrder;

TEST(Divider, is_a_division) {
    std::mt19937 random(1);
    constexpr int kMost = std::numeric_limits<int>::max();
    std::vector<int> divisors{1,       2,         3,    5, 7, 127, 128, 129, 65535, 65536, 65537, (1 << 30) - 1,
                              1 << 30, kMost - 1, kMost};
    for (int i = 0; i < 2000; ++i) divisors.push_back(static_cast<int>(random() >> 1 >> random() % 31) + 1);
    for (const int divisor : divisors) {
        const Divider by(divisor);
        std::vector<int> numbers{
            0, 1, divisor - 1, divisor, kMost - 1, kMost, kMost / divisor * divisor, kMost / divisor * divisor - 1};
        for (int i = 0; i < 50; ++i) numbers.push_back(static_cast<int>(random() >> 1));
        for (const int n : numbers) ASSERT_EQ(by.quotient(n), n / divisor) << n << " / " << divisor;
    }
}

TEST(TileOrder, of_a_list_is_that_of_as_many_tiles) {
    for (const int heads : {1, 3, 16}) {
        for (const int together : {1, 2, heads}) {
            if (together > heads) continue;
            for (const int items : {1, 5, 33}) {
                const TileOrder capacity(heads, 40, together), exact(heads, items, together);
                ASSERT_EQ(capacity.listed_tiles(items), exact.tiles());
                for (int i = 0; i < exact.tiles(); ++i) {
                    ASSERT_EQ(capacity.listed(i, items).head, exact[i].head);
                    ASSERT_EQ(capacity.listed(i, items).block, exact[i].block);
                }
            }
        }
    }
    EXPECT_EQ(TileOrder(4, 40, 2).listed_tiles(0), 0) << "no sequence has a query";
}

TEST(TileOrder, has_every_tile_once_and_the_last_queries_of_a_group_of_heads_first) {
    for (const int heads : {1, 2, 3, 7, 16, 40, 129}) {
        for (const int q_blocks : {1, 2, 3, 12, 33}) {
            for (const int together : {1, 2, 3, 5, heads}) {
                if (together > heads) continue;
                const TileOrder order(heads, q_blocks, together);
                ASSERT_EQ(order.tiles(), heads * q_blocks);
                std::vector<int> met(static_cast<std::size_t>(order.tiles()));
                TileIndex before{-1, 0};
                for (int i = 0; i < order.tiles(); ++i) {
                    const TileIndex place = order[i];
                    ASSERT_TRUE(place.head >= 0 && place.head < heads && place.block >= 0 && place.block < q_blocks);
                    ++met[static_cast<std::size_t>(place.head * q_blocks + place.block)];
                    const bool same_group = before.head >= 0 && before.head / together == place.head / together;
                    if (same_group) ASSERT_LE(place.block, before.block);
                    else ASSERT_EQ(place.block, q_blocks - 1);
                    before = place;
                }
                ASSERT_EQ(std::count(met.begin(), met.end(), 1), order.tiles());
            }
        }
    }
}

TEST(TileOrder, slices_go_round) {
    for (const int warpgroups : {1, 2, 3, 4}) {
        std::vector<int> met(static_cast<std::size_t>(warpgroups * warpgroups));
        int rotation = 0;
        for (int tile = 0; tile < warpgroups; ++tile, rotation = next_rotation(rotation, warpgroups)) {
            for (int w = 0; w < warpgroups; ++w)
                ++met[static_cast<std::size_t>(w * warpgroups + row_block_of(w, rotation, warpgroups))];
        }
        EXPECT_EQ(rotation, 0);
        EXPECT_EQ(std::count(met.begin(), met.end(), 1), warpgroups * warpgroups) << "each has each slice once";
    }
}

/// A model of the kernel's time, in blocks of keys: a tile of n blocks takes n + 2, with its prologue and epilogue. A
/// thread block asks for its next tile when it loads the last block of its current one, and the first to ask gets the
/// next tile of the order. `in_turn`: static scheduling instead.
double model_time(const TileOrder& order, int thread_blocks, bool in_turn,
                  const std::function<int(TileIndex)>& blocks_of) {
    constexpr double kEnds = 2;
    struct Worker {
        double free;  ///< when its tile is done
        int tile;
    };
    const auto after = [](const Worker& a, const Worker& b) { return a.free > b.free; };
    std::priority_queue<Worker, std::vector<Worker>, decltype(after)> workers(after);
    const auto start = [&](double at, int tile) { workers.push({at + blocks_of(order[tile]) + kEnds, tile}); };
    int counter = std::min(thread_blocks, order.tiles());
    for (int b = 0; b < counter; ++b) start(0, b);
    double end = 0;
    while (!workers.empty()) {
        // All ask one block before they are free, so the first to be free has asked first.
        const Worker worker = workers.top();
        workers.pop();
        end = worker.free;
        const int next = in_turn ? worker.tile + thread_blocks : counter++;
        if (next < order.tiles()) start(worker.free, next);
    }
    return end;
}

/// The share of work in the time of all thread blocks: tiles of 128 queries of causal heads, blocks of 128 keys.
double causal_balance(int heads, int len, int together, int thread_blocks, bool in_turn = false) {
    const int q_blocks = len / 128;
    const auto blocks_of = [](TileIndex place) { return place.block + 1; };
    const TileOrder order(heads, q_blocks, together);
    double work = 0;
    for (int i = 0; i < order.tiles(); ++i) work += blocks_of(order[i]) + 2;
    return work / thread_blocks / model_time(order, thread_blocks, in_turn, blocks_of);
}

TEST(TileOrder, keeps_a_gpu_busy_under_a_causal_mask) {
    EXPECT_GT(causal_balance(512, 512, 128, 132), 0.97);
    EXPECT_GT(causal_balance(256, 1024, 64, 132), 0.97);
    EXPECT_GT(causal_balance(64, 4096, 16, 132), 0.97);
    EXPECT_GT(causal_balance(16, 16384, 4, 132), 0.95);
    EXPECT_GT(causal_balance(1, 32768, 1, 132), 0.95);
    EXPECT_GT(causal_balance(3, 8192, 3, 132), 0.70);  // 192 tiles: the longest alone take half of the time
}

TEST(TileOrder, is_no_further_from_the_best_than_the_longest_tile) {
    // Graham's bound of list scheduling, for any number of thread blocks.
    for (const int heads : {1, 3, 16, 40}) {
        for (const int len : {512, 1536, 4096}) {
            for (const int thread_blocks : {1, 2, 7, 66, 114, 132, 1000}) {
                const double longest = len / 128 + 2;
                const double balance = causal_balance(heads, len, heads, thread_blocks);
                const int q_blocks = len / 128;
                const double work = heads * (q_blocks * (q_blocks + 1) / 2 + 2.0 * q_blocks) / thread_blocks;
                EXPECT_LE(work / balance, work + longest) << heads << " heads of " << len << ", " << thread_blocks;
            }
        }
    }
}

TEST(TileOrder, by_the_counter_is_not_behind_tiles_in_turn) {
    for (const int heads : {3, 16, 40, 64}) {
        for (const int len : {1024, 4096, 8192}) {
            EXPECT_GE(causal_balance(heads, len, heads, 132), 0.999 * causal_balance(heads, len, heads, 132, true))
                << heads << " heads of " << len;
        }
    }
}

}  // namespace
}  // namespace tessera::tile_order_test
