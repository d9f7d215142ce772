// SPDX-License-Identifier: Apache-2.0
//
// The order in which key blocks add to dQ in cuda.fa1.backward and cuda.fa2.backward (cuda/gradient/host/dq_order.hpp).
// No GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/gradient/host/dq_order.hpp"

namespace tessera::check::gradient_dq_order_test {
namespace {

using cuda::kSegments;
using cuda::gradient::KeyBlockOrder;
using cuda::gradient::segment_size;

constexpr int kLengths[] = {1, 63, 64, 65, 129, 333, 1000, 2049};

const Mask kMasks[] = {{},
                       {.causal = Causal::bottom_right},
                       {.causal = Causal::top_left},
                       {.window_left = 100, .window_right = 50},
                       {.window_left = 0, .window_right = 700},
                       {.causal = Causal::top_left, .window_left = 90}};

/// The numbers of a call that the order depends on.
struct Call {
    Band band;
    int block_kv;
    int log2_block_q;
    int segments;     // of the call
    bool segmented;   // this sequence is cut into them
    int more_blocks;  // of the longest sequence
    int parts = 1;    // of the query tiles, in launches one after the other

    int blocks() const { return static_cast<int>((band.len_kv + block_kv - 1) / block_kv); }
    std::string name() const {
        return "len_q " + std::to_string(band.len_q) + ", len_kv " + std::to_string(band.len_kv) + ", band " +
               std::to_string(band.low) + " ... " + std::to_string(band.high) + ", block_kv " +
               std::to_string(block_kv) + ", block_q 2^" + std::to_string(log2_block_q) + ", segments " +
               std::to_string(segments) + (segmented ? ", segmented" : "") + ", " + std::to_string(more_blocks) +
               " more blocks";
    }
};

/// Starts all CTAs of one head in order. Each key block has to start once and visit the tiles that see it once; each
/// predecessor has to be the block that has added to the accumulator last.
void expect_right(const Call& call) {
    SCOPED_TRACE(call.name());
    std::map<std::pair<int, int>, int> last;    // (accumulator, tile): the last block that added
    std::map<std::pair<int, int>, int> visits;  // (block, tile)
    std::vector<int> starts(call.blocks(), 0);
    const int most = call.blocks() + call.more_blocks;
    const int tiles = static_cast<int>((call.band.len_q >> call.log2_block_q) + 1);
    const int tiles_of_part = (tiles + call.parts - 1) / call.parts;
    for (int part = 0; part < call.parts; ++part) {
        for (int segment = 0; segment < call.segments; ++segment) {
            for (int started = 0; started < segment_size(call.segments, most); ++started) {
                KeyBlockOrder order;
                order.set_started(call.band, segment, started, call.segments, call.blocks(), most, call.segmented,
                                  call.block_kv, call.log2_block_q);
                if (order.block >= call.blocks()) continue;
                if (call.parts > 1) order.clamp(part * tiles_of_part, (part + 1) * tiles_of_part);
                if (part == 0) ++starts[order.block];
                for (int i = 0; i < order.own.count(); ++i) {
                    const std::pair<int, int> to{order.own.accumulator_of(i), order.own.query_block_of(i)};
                    const auto found = last.find(to);
                    EXPECT_EQ(order.predecessor(to.first, to.second), found == last.end() ? -1 : found->second)
                        << "block " << order.block << ", accumulator " << to.first << ", tile " << to.second;
                    last[to] = order.block;
                    ++visits[{order.block, to.second}];
                }
            }
        }
    }
    const int block_q = 1 << call.log2_block_q;
    for (int n = 0; n < call.blocks(); ++n) {
        EXPECT_EQ(starts[n], 1) << "block " << n;
        const std::int64_t first_key = std::int64_t{n} * call.block_kv;
        const Range queries = call.band.q_range(first_key, std::min(first_key + call.block_kv, call.band.len_kv));
        for (int tile = 0; tile * block_q < call.band.len_q; ++tile) {
            const bool sees = !queries.empty() && queries.begin < (tile + 1) * block_q && queries.end > tile * block_q;
            EXPECT_EQ((visits[{n, tile}]), sees ? 1 : 0) << "block " << n << ", tile " << tile;
        }
    }
}

TEST(GradientDqOrder, each_block_follows_the_one_that_has_added_last) {
    for (const Mask& mask : kMasks) {
        for (const int len_q : kLengths) {
            for (const int len_kv : kLengths) {
                const Band band = mask.bind(len_q, len_kv);
                for (const int segments : {1, kSegments}) {
                    expect_right({band, 64, 6, segments, false, 0});
                    expect_right({band, 128, 7, segments, false, 5});
                    expect_right({band, 64, 6, segments, false, 0, 3});
                }
            }
        }
    }
}

TEST(GradientDqOrder, segments_of_a_triangle_start_with_the_first_blocks) {
    for (const int len : kLengths) {
        const Band band = Mask{.causal = Causal::bottom_right}.bind(len, len);
        ASSERT_TRUE(cuda::is_causal_square(band));
        for (const int more_blocks : {0, 1, 7}) {
            expect_right({band, 64, 6, kSegments, true, more_blocks});
            expect_right({band, 128, 7, kSegments, true, more_blocks});
            expect_right({band, 128, 6, kSegments, true, more_blocks});
            expect_right({band, 64, 6, kSegments, true, more_blocks, 4});
        }
    }
    KeyBlockOrder first;
    first.set_started(Mask{.causal = Causal::bottom_right}.bind(1024, 1024), 0, 0, kSegments, 16, 16, true, 64, 6);
    EXPECT_EQ(first.block, 3) << "of 16 blocks in 4 segments";
}

/// A sequence of a ragged call's list: each head has every key block once, and adds in the order that it has in a dense
/// call.
TEST(GradientDqOrder, a_listed_sequence_adds_in_the_order_of_a_dense_one) {
    constexpr int kHeadsKv = 3, kBlockKv = 64;
    int segmented = 0, split = 0;
    for (const Mask& mask : kMasks) {
        for (const int group : {1, 4, 8}) {
            for (const int len_q : kLengths) {
                for (const int len_kv : kLengths) {
                    const Band band = mask.bind(len_q, len_kv);
                    const int heads = cuda::HeadSplit::heads_per_split(band, group);
                    const cuda::gradient::SequenceBlocks blocks(mask, band, group, heads, kBlockKv);
                    SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_kv));
                    segmented += blocks.segmented ? 1 : 0;
                    split += blocks.splits > 1 ? 1 : 0;
                    std::map<std::pair<int, int>, int> starts;            // (head, block)
                    std::map<std::tuple<int, int, int>, int> last_added;  // (head, accumulator, tile)
                    for (int index = 0; index < blocks.items() * kHeadsKv; ++index) {
                        const cuda::PlacedKeyBlock own = blocks.place(index, kHeadsKv);
                        ASSERT_TRUE(own.head >= 0 && own.head < kHeadsKv * blocks.splits);
                        ++starts[{own.head, own.n}];
                        KeyBlockOrder order;
                        order.set_in_sequence(band, own.n, blocks.count, blocks.segmented, kBlockKv, 6);
                        for (int i = 0; i < order.own.count(); ++i) {
                            const int accumulator = order.own.accumulator_of(i), tile = order.own.query_block_of(i);
                            const auto [last, first] = last_added.try_emplace({own.head, accumulator, tile}, own.n);
                            EXPECT_EQ(order.predecessor(accumulator, tile), first ? -1 : last->second);
                            last->second = own.n;
                        }
                    }
                    EXPECT_EQ(starts.size(), static_cast<std::size_t>(blocks.items() * kHeadsKv));
                    for (const auto& [block, count] : starts) EXPECT_TRUE(count == 1 && block.second < blocks.count);
                }
            }
        }
    }
    EXPECT_GT(segmented, 5);
    EXPECT_GT(split, 5);
}

}  // namespace
}  // namespace tessera::check::gradient_dq_order_test
