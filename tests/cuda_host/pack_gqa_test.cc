// SPDX-License-Identifier: Apache-2.0
//
// PackGQA of fa3 (src/cuda/fa3/host/pack_gqa.hpp): the calls that it packs, and the query and head of a row.
#include "cuda/fa3/host/pack_gqa.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace tessera::pack_gqa_test {
namespace {

using cuda::fa3::kMaxPackedHeads;
using cuda::fa3::pack_gqa_of;
using cuda::fa3::PackGqa;
using cuda::fa3::tiles_of;

Problem grouped(std::int64_t batch, std::int64_t len_q, std::int64_t len_kv, std::int64_t heads_q,
                std::int64_t heads_kv, std::int64_t head_dim = 128) {
    Problem p = Problem::dense(batch, len_q, heads_q, head_dim, DType::bf16);
    p.len_kv = len_kv;
    p.heads_kv = heads_kv;
    return p;
}
int heads_stacked(const Problem& p) { return pack_gqa_of(p).heads(); }

TEST(PackGqa, has_every_query_of_every_head_in_one_row) {
    for (int shift = 0; 1 << shift <= kMaxPackedHeads; ++shift) {
        const PackGqa stack{shift};
        std::set<std::pair<int, int>> met;
        for (int row = 0; row < 192; ++row) {
            EXPECT_LT(stack.head(row), stack.heads());
            EXPECT_TRUE(met.insert({stack.query(row), stack.head(row)}).second);
            // A warp's 16 rows, which TMA stores at once, are whole queries.
            EXPECT_TRUE(row % 16 != 0 || stack.head(row) == 0);
        }
        EXPECT_EQ(stack.query(192), 192 / stack.heads());
    }
}

TEST(PackGqa, is_for_few_queries_of_a_group) {
    EXPECT_EQ(heads_stacked(grouped(4, 16, 4096, 64, 8)), 8);
    EXPECT_EQ(heads_stacked(grouped(4, 1, 4096, 32, 1)), kMaxPackedHeads) << "no more than a warp stores at once";
    EXPECT_EQ(heads_stacked(grouped(4, 16, 4096, 24, 2)), 4) << "of a group of 12";
    EXPECT_EQ(heads_stacked(grouped(4, 16, 4096, 15, 3)), 1) << "of a group of 5";
    EXPECT_EQ(heads_stacked(grouped(4, 16, 4096, 8, 8)), 1) << "no group";
    EXPECT_EQ(heads_stacked(grouped(4, 4096, 4096, 64, 8)), 1) << "rows fill their tiles";
    EXPECT_EQ(heads_stacked(grouped(4, 200, 200, 64, 8)), 8);
    Problem p = grouped(4, 16, 4096, 64, 8);
    p.alibi = true;
    EXPECT_EQ(heads_stacked(p), 1) << "slopes are a head's own";
    p.alibi = false;
    p.softcap = 30;
    EXPECT_EQ(heads_stacked(p), 8);
    p.mask.causal = Causal::bottom_right;
    EXPECT_EQ(heads_stacked(p), 8);
}

TEST(PackGqa, saves_tiles_where_it_is_taken) {
    std::mt19937 random(20261123);
    int taken = 0;
    for (int i = 0; i < 3000; ++i) {
        const auto below = [&](std::uint32_t most) { return 1 + static_cast<std::int64_t>(random() % most); };
        const std::int64_t heads_kv = below(4);
        Problem p = grouped(below(20), below(400), below(3000), heads_kv * below(34), heads_kv, 8 * below(32));
        if (random() % 2 == 0) p.mask.causal = Causal::bottom_right;
        const PackGqa stack = pack_gqa_of(p);
        const int block_q = cuda::fa3::config_of(p).block_q();
        EXPECT_EQ(p.group() % stack.heads(), 0);
        EXPECT_LE(stack.heads(), kMaxPackedHeads);
        if (stack.heads() == 1) continue;
        ++taken;
        EXPECT_LE(10 * tiles_of(p, block_q, stack), 9 * tiles_of(p, block_q, {})) << p.describe();
    }
    EXPECT_GT(taken, 500);
}

}  // namespace
}  // namespace tessera::pack_gqa_test
