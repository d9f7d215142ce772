// SPDX-License-Identifier: Apache-2.0
//
// How the decode kernels split the keys (src/cuda/decode/host). A row's splits depend on its number of keys alone, and
// the splits that a CTA goes through for its tile of rows hold those of every row.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "cuda/decode/host/dispatch.hpp"

namespace tessera::cuda::decode::decode_test {
namespace {

Band32 band_of(const Mask& mask, int len_q, int len_kv) { return Band32(mask.bind(len_q, len_kv)); }

TEST(DecodeSplits, grow_with_the_keys_up_to_512) {
    EXPECT_EQ(split_shift(1), 6);
    EXPECT_EQ(split_shift(1024), 6);
    EXPECT_EQ(split_shift(1025), 7);
    EXPECT_EQ(split_shift(2049), 8);
    EXPECT_EQ(split_shift(4097), 9);
    EXPECT_EQ(split_shift(1 << 30), 9);
    const Splits splits(Span{1000, 3000});  // 2,000 keys: 128 each
    EXPECT_EQ(splits.first, 7);
    EXPECT_EQ(splits.count, 17);
    EXPECT_EQ(Splits(Span{0, 0}).count, 0);
}

TEST(DecodeSplits, of_a_row_are_bounded_by_its_keys) {
    for (int keys = 1; keys < 20'000; keys += 7) {
        for (const int begin : {0, 1, 63, 511}) {
            EXPECT_LE(Splits(Span{begin, begin + keys}).count, most_splits(keys)) << keys << " keys from " << begin;
        }
    }
}

class Draw {
 public:
    int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
    Mask mask() {
        Mask m;
        m.causal = static_cast<Causal>(between(0, 2));
        if (between(0, 2) == 0) m.window_left = between(0, 1) == 0 ? between(0, 300) : between(900, 5000);
        if (between(0, 4) == 0) m.window_right = between(0, 300);
        return m;
    }

 private:
    std::mt19937 engine_{20261128};
};

/// Every split of every row is in the list of its tile, which Items bounds.
TEST(DecodeSplits, of_a_tile_hold_those_of_its_rows) {
    Draw draw;
    for (int i = 0; i < 20'000; ++i) {
        const int len_q = draw.between(0, 3) == 0 ? draw.between(1, 300) : draw.between(1, 9);
        const int around[] = {1024, 2048, 4096, draw.between(1, 9000)};
        const int len_kv = std::max(around[draw.between(0, 3)] + draw.between(-70, 70), 1);
        const int group = draw.between(1, 12);
        const int rows_of_tile = draw.between(0, 1) == 0 ? 16 : 64;
        const Mask mask = draw.mask();
        const Band32 band = band_of(mask, len_q, len_kv);
        const Items items(band, {0, len_q}, len_kv, group, rows_of_tile);
        ASSERT_EQ(items.tiles, (len_q * group + rows_of_tile - 1) / rows_of_tile);
        for (int tile = 0; tile < items.tiles; ++tile) {
            const int first_row = tile * rows_of_tile;
            const int last_row = std::min(first_row + rows_of_tile, len_q * group) - 1;
            const RowSplits of_tile(band, first_row / group, last_row / group);
            ASSERT_LE(of_tile.count(), items.splits) << len_q << " x " << len_kv << ", group " << group;
            for (int row = first_row; row <= last_row; row += group) {
                const Splits own(visible_of(band, row / group));
                if (own.count == 0) continue;
                const Splits& list = own.shift == of_tile.small.shift ? of_tile.small : of_tile.large;
                ASSERT_EQ(own.shift, list.shift) << len_q << " x " << len_kv << ", query " << row / group;
                ASSERT_GE(own.first, list.first);
                ASSERT_LE(own.first + own.count, list.first + list.count);
            }
        }
    }
}

/// 1,087 keys from key 127 on: 18 splits of 64 keys, for rows that see 1,024, and 10 of 128.
TEST(DecodeSplits, of_two_lengths_are_28_at_most) {
    constexpr int kQueries = 128, kKeys = 1214;
    const Band32 band = band_of({.window_left = 959}, kQueries, kKeys);
    const RowSplits first_tile(band, 0, 63);
    EXPECT_EQ(first_tile.small.count, 18);
    EXPECT_EQ(first_tile.large.count, 10);
    EXPECT_GE(Items(band, {0, kQueries}, kKeys, 1, 64).splits, first_tile.count());
}

TEST(DecodeShape, has_the_fewest_rows_that_hold_a_sequence) {
    Problem p{.dtype = DType::bf16,
              .batch = 4,
              .len_q = 1,
              .len_kv = 4096,
              .heads_q = 32,
              .heads_kv = 8,
              .head_dim = 128,
              .head_dim_v = 128};
    EXPECT_EQ(config_of(p).rows, 16);
    p.len_q = 5;  // 20 rows
    EXPECT_EQ(config_of(p).rows, 64);
    EXPECT_EQ(row_tiles(p), 1);
    p.len_q = 90;
    EXPECT_EQ(config_of(p).rows, 64);
    EXPECT_EQ(row_tiles(p), 6);
    p.head_dim_v = 150;
    EXPECT_EQ(config_of(p).head_dim, 192);
    p.head_dim_v = 200;
    EXPECT_EQ(config_of(p).head_dim, 256);
    p.head_dim = p.head_dim_v = 40;
    EXPECT_EQ(config_of(p).head_dim, 64);
    EXPECT_EQ(config_of(p).rows, 64);
}

/// 2,048 new tokens of a cache of 131,072 keys would need 8.8 GB of partial results.
TEST(DecodeQueries, have_bounded_memory) {
    Problem p{.dtype = DType::bf16,
              .batch = 1,
              .len_q = 2048,
              .len_kv = 131'072,
              .heads_q = 32,
              .heads_kv = 8,
              .head_dim = 128,
              .head_dim_v = 128,
              .kv_lengths = true};
    EXPECT_EQ(queries_at_once(p), 112);  // of 32 * 258 * (128 * 4 + 8) bytes: 481 MB
    p.len_kv = 1 << 30;
    EXPECT_EQ(queries_at_once(p), 1);
    p.len_kv = 4096;
    EXPECT_EQ(queries_at_once(p), 1888);
    p.len_q = 1;
    p.batch = 512;
    EXPECT_EQ(queries_at_once(p), 512);
}

/// The shared memory of a multiprocessor and of a CTA on compute capability 9.0.
TEST(DecodeShape, fits_a_multiprocessor) {
    constexpr int kOfMultiprocessor = 228 * 1024, kOfCta = 227 * 1024, kReserved = 1024;
    for (const Config& c : Shapes::kConfigs) {
        EXPECT_LE(c.shared_bytes() + c.static_bytes(), kOfCta) << c.head_dim;
        // By wgmma, warps tell each other less than by mma.sync.
        const int used = c.rows > 16 ? c.static_bytes() - 192 * c.rows : c.static_bytes();
        EXPECT_LE(c.ctas * (c.shared_bytes() + used + kReserved), kOfMultiprocessor) << c.head_dim << " " << c.rows;
    }
}

}  // namespace
}  // namespace tessera::cuda::decode::decode_test
