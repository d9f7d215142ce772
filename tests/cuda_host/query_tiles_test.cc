// SPDX-License-Identifier: Apache-2.0
//
// The query tiles of a ragged call on CUDA: every tile has an index, and their number follows the sequences.
#include "cuda/host/query_tiles.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check::query_tiles_test {
namespace {

/// Lengths of sequences: many without queries, some of one, some of several tiles.
std::vector<std::int64_t> lengths_of(std::mt19937& random) {
    std::vector<std::int64_t> lengths(1 + random() % 40);
    for (std::int64_t& length : lengths) {
        const std::int64_t most[] = {1, 2, 130, 1000};
        length = static_cast<std::int64_t>(random()) % most[random() % 4];
    }
    return lengths;
}

TEST(QueryTiles, every_tile_of_every_sequence_has_one_place) {
    std::mt19937 random(20261122);
    int met = 0;
    for (int i = 0; i < 2000; ++i) {
        const std::vector<std::int64_t> lengths = lengths_of(random);
        const int block_q = std::vector{64, 128, 192}[random() % 3];
        std::vector<std::int64_t> begins(lengths.size() + 1);
        std::partial_sum(lengths.begin(), lengths.end(), begins.begin() + 1);
        Problem p = make_ragged(lengths, lengths, 2, 1, 64, DType::bf16);
        std::vector<std::vector<int>> seen;
        for (const std::int64_t length : lengths) {
            seen.emplace_back(static_cast<std::size_t>((length + block_q - 1) / block_q));
        }
        for (int place = 0; place < cuda::query_tiles(p, block_q); ++place) {
            const cuda::QueryTile tile =
                cuda::ragged_tile(static_cast<int>(lengths.size()), place, block_q,
                                  [&](int sequence) { return begins[static_cast<std::size_t>(sequence)]; });
            ASSERT_GE(tile.block, 0);
            auto& of_sequence = seen.at(static_cast<std::size_t>(tile.batch));
            if (static_cast<std::size_t>(tile.block) >= of_sequence.size()) continue;
            ++of_sequence[static_cast<std::size_t>(tile.block)];
            ++met;
        }
        for (const auto& of_sequence : seen) {
            for (const int times : of_sequence) ASSERT_EQ(times, 1) << p.describe();
        }
    }
    EXPECT_GT(met, 10000);
}

TEST(QueryTiles, a_looser_bound_asks_for_no_more) {
    Problem p = make_ragged({3, 0, 700}, {5, 1, 9}, 4, 2, 64, DType::bf16);
    const std::int64_t tight = cuda::query_tiles(p, 128);
    EXPECT_EQ(tight, 703 / 128 + 3);
    p.len_q = p.len_kv = 1 << 20;
    EXPECT_EQ(cuda::query_tiles(p, 128), tight);
    EXPECT_EQ(cuda::query_heads(p), 4);
}

}  // namespace
}  // namespace tessera::check::query_tiles_test
