// SPDX-License-Identifier: Apache-2.0
//
// The shared memory of the one launch of decode_block(): which rows fit, as docs/decode-block.md says for 227 KiB.
#include <gtest/gtest.h>

#include "cuda/block/host/config.h"

namespace tessera::cuda::block::block_layout_test {
namespace {

constexpr int kHopperBytes = 227 * 1024;

/// The layout of the one launch for a widest row of `columns`. The bytes before the rows, and those of a group, are
/// fixed_bytes() as nvcc compiles it.
SharedLayout layout_of(const Config& config, std::int64_t batch, std::int64_t columns) {
    const bool is_64 = config.head_dim == 64;
    return {config, is_64 ? 12416 : 12800, is_64 ? 9728 : 14080, config.groups(), batch, columns, kHopperBytes};
}

/// The most sequences of one launch.
int most_sequences(const Config& config, std::int64_t columns) {
    int most = 0;
    for (int batch = 1; batch <= Config::kMostBatch; ++batch) {
        if (layout_of(config, batch, columns).stages >= Config::kLeastStages) most = batch;
    }
    return most;
}

TEST(BlockLayout, takes_the_sequences_that_the_page_says) {
    const Config &of_64 = HeadDim64::kConfig, &of_128 = HeadDim128::kConfig;
    for (const std::int64_t columns : {1024, 2048, 4096}) {
        EXPECT_EQ(most_sequences(of_64, columns), 8) << columns;
        EXPECT_EQ(most_sequences(of_128, columns), 8) << columns;
    }
    EXPECT_EQ(most_sequences(of_64, 8192), 8);
    EXPECT_EQ(most_sequences(of_128, 8192), 6);
    EXPECT_EQ(most_sequences(of_64, 16384), 4);
    EXPECT_EQ(most_sequences(of_128, 16384), 3);
    EXPECT_EQ(layout_of(of_128, 7, 8192).stages, 5);
    EXPECT_EQ(layout_of(of_128, 8, 8192).stages, 4);
}

TEST(BlockLayout, gives_up_groups_for_stages) {
    const SharedLayout four = layout_of(HeadDim128::kConfig, 4, 8192), six = layout_of(HeadDim128::kConfig, 6, 8192);
    EXPECT_EQ(four.groups, 3);
    EXPECT_EQ(six.groups, 1);
    EXPECT_EQ(six.stages, Config::kLeastStages);
}

TEST(BlockLayout, fits_and_overlaps_nothing) {
    for (const Config& config : Shapes::kConfigs) {
        for (int batch = 1; batch <= Config::kMostBatch; ++batch) {
            for (std::int64_t columns = 32; columns <= 16384; columns += 32) {
                const SharedLayout layout = layout_of(config, batch, columns);
                if (layout.stages < Config::kLeastStages) continue;
                ASSERT_LE(layout.bytes, kHopperBytes) << batch << " x " << columns;
                ASSERT_GE(layout.ring, layout.rows + batch * row_bytes(columns)) << batch << " x " << columns;
                ASSERT_EQ(layout.bytes, layout.ring + layout.stages * config.stage_bytes());
                ASSERT_LE(layout.stages, Config::kMostStages);
            }
        }
    }
}

}  // namespace
}  // namespace tessera::cuda::block::block_layout_test
