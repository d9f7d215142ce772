// SPDX-License-Identifier: Apache-2.0
//
// The key blocks of a tile (src/cuda/host/block_range.hpp), and fa3's of a warpgroup's slice of it, compared with all
// pairs.
#include "cuda/fa3/host/block_range.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/fa3/host/tile_order.hpp"

namespace tessera::block_range_test {
namespace {

using cuda::Band32;
using cuda::BlockRange;
using cuda::blocks_of;
using cuda::fa3::part_of;

constexpr int kBlock = 16;
constexpr int kSlice = 8;

struct Met {
    bool any = false;  ///< a pair of the block is visible
    bool all = true;
};
Met pairs(int block, int begin, int end, const Band32& visible) {
    Met met;
    for (int q = begin; q < end; ++q) {
        for (int k = block * kBlock; k < (block + 1) * kBlock; ++k) {
            const bool sees = q + visible.low <= k && k <= q + visible.high && k <= visible.last_key;
            met.any |= sees;
            met.all &= sees;
        }
    }
    return met;
}

/// A band of keys, as masks make it, and queries.
struct Case {
    Band32 visible;
    int begin, end;
};

/// "case 17: queries 3 to 9 see keys q - 5 to q + 7, up to key 44"
std::string describe(int number, int begin, int end, const Band32& visible) {
    const auto from_query = [](int offset) {
        return (offset < 0 ? "q - " : "q + ") + std::to_string(std::abs(offset));
    };
    return "case " + std::to_string(number) + ": queries " + std::to_string(begin) + " to " + std::to_string(end - 1) +
           " see keys " + from_query(visible.low) + " to " + from_query(visible.high) + ", up to key " +
           std::to_string(visible.last_key);
}

Case draw(std::mt19937& random) {
    const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
    Case c{};
    c.visible.last_key = upto(99);
    c.visible.low = upto(3) == 0 ? -1000 : upto(160) - 80;
    c.visible.high = upto(3) == 0 ? 1000 : c.visible.low + upto(60) - 3;
    c.begin = upto(80);
    c.end = c.begin + 1 + upto(3 * kSlice - 1);
    return c;
}

/// The blocks that both ways to count them find: in 32 bits for fa3, and from a Band for the other schedules.
TEST(BlockRange, has_the_blocks_that_are_seen) {
    std::mt19937 random(1);
    int empty = 0;
    for (int i = 0; i < 20000; ++i) {
        const auto [visible, begin, end] = draw(random);
        SCOPED_TRACE(describe(i, begin, end, visible));
        Band band;
        band.len_q = end;
        band.len_kv = visible.last_key + 1;
        band.low = visible.low;
        band.high = visible.high;
        const BlockRange of_fa3 = blocks_of<kBlock>(begin, end, visible);
        empty += of_fa3.count() == 0 ? 1 : 0;
        for (const BlockRange& blocks : {of_fa3, BlockRange(band, begin, end, kBlock)}) {
            for (int n = 0; n <= visible.last_key / kBlock + 1; ++n) {
                const Met met = pairs(n, begin, end, visible);
                const bool in = blocks.begin <= n && n < blocks.end;
                ASSERT_TRUE(in || !met.any) << "block of keys " << n;
                ASSERT_EQ(in && !blocks.partial(n), in && met.all) << "block of keys " << n;
            }
        }
    }
    EXPECT_GT(empty, 1000);
}

TEST(BlockRange, of_a_slice_lies_in_its_tile_and_has_one_block_at_least) {
    std::mt19937 random(2);
    int hidden = 0;
    for (int i = 0; i < 20000; ++i) {
        const auto [visible, begin, end] = draw(random);
        SCOPED_TRACE(describe(i, begin, end, visible));
        const BlockRange tile = blocks_of<kBlock>(begin, end, visible);
        if (tile.count() == 0) continue;
        for (int first = begin; first < end; first += kSlice) {
            const int last = std::min(first + kSlice, end);
            const BlockRange own = part_of(tile, blocks_of<kBlock>(first, last, visible));
            SCOPED_TRACE("slice of queries " + std::to_string(first) + " to " + std::to_string(last - 1));
            ASSERT_TRUE(tile.begin <= own.begin && own.begin < own.end && own.end <= tile.end);
            for (int n = tile.begin; n < tile.end; ++n) {
                const Met met = pairs(n, first, last, visible);
                const bool in = own.begin <= n && n < own.end;
                ASSERT_TRUE(in || !met.any) << "block of keys " << n;
                ASSERT_EQ(in && !own.partial(n), in && met.all) << "block of keys " << n;
                // Hidden weights are multiplied only with V that was sanitized.
                ASSERT_TRUE(!in || !own.partial(n) || tile.partial(n));
                hidden += in && !met.any ? 1 : 0;
            }
        }
        // The last block belongs to the first slice, which waits until V is sanitized.
        ASSERT_EQ(part_of(tile, blocks_of<kBlock>(begin, std::min(begin + kSlice, end), visible)).begin, tile.begin);
    }
    EXPECT_GT(hidden, 100) << "slices that see no key of their tile's";
}

/// Expects each visible pair of a head to come once, over the tiles, slices and blocks of a compiled shape, and blocks
/// to be partial exactly if they have hidden pairs.
template <class Shape>
void expect_every_pair_once(int len_q, const Band32& visible) {
    constexpr auto kConfig = Shape::kConfig;
    constexpr int kBlockKv = kConfig.block_kv;
    SCOPED_TRACE(cuda::shape_name<Shape>());
    const int q_blocks = (len_q + kConfig.block_q() - 1) / kConfig.block_q();
    std::set<int> tiles;
    const cuda::fa3::TileOrder order(1, q_blocks, 1);
    for (int i = 0; i < order.tiles(); ++i) {
        ASSERT_TRUE(tiles.insert(order[i].block).second);
        const int begin = order[i].block * kConfig.block_q();
        const int end = std::min(begin + kConfig.block_q(), len_q);
        const BlockRange tile = blocks_of<kBlockKv>(begin, end, visible);
        for (int q = begin; q < end; ++q) {
            const int slice = q / 64 * 64;
            BlockRange own = tile;
            if (kConfig.skips_blocks() && tile.count() > 0) {
                own = part_of(tile, blocks_of<kBlockKv>(slice, std::min(slice + 64, end), visible));
            }
            const int first = std::max(q + visible.low, 0);
            const int last = std::min(q + visible.high, visible.last_key);
            if (first > last) continue;
            ASSERT_LE(own.begin * kBlockKv, first) << "query " << q;
            ASSERT_GT(own.end * kBlockKv, last) << "query " << q;
            for (int n = own.begin; n < own.end; ++n) {
                const bool whole = first <= n * kBlockKv && (n + 1) * kBlockKv - 1 <= last;
                ASSERT_TRUE(own.partial(n) || whole) << "query " << q << ", block of keys " << n;
            }
        }
    }
    ASSERT_EQ(static_cast<int>(tiles.size()), q_blocks);
}

template <class... Shapes>
void expect_of_every_shape(cuda::ShapeList<Shapes...>, int len_q, const Band32& visible) {
    (expect_every_pair_once<Shapes>(len_q, visible), ...);
}

TEST(BlockRange, columns_before_an_end_have_a_bit_each) {
    for (int end = -200; end <= 300; ++end) {
        const std::uint32_t bits = cuda::fa3::columns_before(end);
        for (int i = 0; i < 32; ++i) {
            const int column = i / 2 * 8 + i % 2;
            ASSERT_EQ(bits >> i & 1U, column < end ? 1U : 0U) << "end " << end << ", column " << column;
        }
    }
}

TEST(BlockRange, of_every_compiled_shape_has_every_pair_once) {
    std::mt19937 random(3);
    const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
    for (int i = 0; i < 300; ++i) {
        const int len_q = 1 + upto(699);
        Band32 visible{-10000, 10000, upto(699)};
        if (upto(3) > 0) visible.high = visible.last_key + 1 - len_q;  // causal, to the last key
        if (upto(3) == 0) visible.high = upto(1000) - 300;
        if (upto(3) == 0) visible.low = visible.high - upto(300);
        SCOPED_TRACE(describe(i, 0, len_q, visible));
        expect_of_every_shape(cuda::fa3::Shapes{}, len_q, visible);
        if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace tessera::block_range_test
