// SPDX-License-Identifier: Apache-2.0
//
// decode_block() on the CPU and, where there is one, on a GPU: every phase against fp64, and bits that depend on the
// row alone. A GPU's refusals of shapes are skipped; the ways of a device have the same bits.
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "kernels/decode_block_reference.hpp"
#include "printed.hpp"
#include "registry.hpp"
#include "tessera/error.hpp"

namespace tessera::kernels_test::decode_block_test {
namespace {

using decode_block_case::Block;

class DecodeBlock : public testing::TestWithParam<DeviceType> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable(device())) GTEST_SKIP() << *reason;
        if (decode_block_kernels(device()) == nullptr) GTEST_SKIP() << "no kernels for this device in this build";
    }
    static Device device() { return {GetParam(), 0}; }

    /// The plan, or nothing for a Problem that the GPU's kernels refuse.
    static std::optional<DecodeBlockPlan> plan_of(const DecodeBlockProblem& problem, DecodeBlockOptions options = {}) {
        options.device = device();
        if (GetParam() == DeviceType::cpu) return decode_block_plan(problem, options);
        try {
            return decode_block_plan(problem, options);
        } catch (const Error& error) {
            if (error.code() != ErrorCode::unsupported) throw;
            return std::nullopt;
        }
    }

    /// A plan for each way that the device has.
    static std::vector<DecodeBlockPlan> plans_of(const DecodeBlockProblem& problem) {
        std::vector<DecodeBlockPlan> plans;
        for (const DecodeBlockWay way : {DecodeBlockWay::chain, DecodeBlockWay::one_launch}) {
            if (way == DecodeBlockWay::one_launch && GetParam() == DeviceType::cpu) continue;
            if (auto plan = plan_of(problem, {.way = way})) plans.push_back(*plan);
        }
        return plans;
    }
};

/// Makes the block, runs every way, and compares it with fp64 and the ways with each other.
void expect_right_in_every_way(Block block, const std::vector<DecodeBlockPlan>& plans) {
    SCOPED_TRACE(block.problem.describe() + fmt::format(", seed {}", block.seed));
    block.make();
    std::optional<Block> first;
    for (const DecodeBlockPlan& plan : plans) {
        SCOPED_TRACE(name_of(plan.way));
        Block ran = block;
        decode_block_case::run(plan, ran.args());
        if (first) {
            EXPECT_EQ(ran.k_cache.bytes(), first->k_cache.bytes());
            EXPECT_EQ(ran.v_cache.bytes(), first->v_cache.bytes());
            EXPECT_EQ(ran.o.bytes(), first->o.bytes());
            EXPECT_EQ(ran.lse.bytes(), first->lse.bytes());
            EXPECT_EQ(ran.out.bytes(), first->out.bytes());
        } else {
            decode_block_case::expect_right(ran, block);
            first = ran;
        }
    }
}

TEST_P(DecodeBlock, is_right_for_drawn_problems) {
    int refused = 0;
    constexpr int kCases = 60;
    std::set<std::int64_t> batches, groups;
    for (std::uint64_t seed = 1; seed <= kCases; ++seed) {
        std::mt19937_64 random(seed);
        const auto pick = [&](std::initializer_list<std::int64_t> from) {
            return from.begin()[random() % from.size()];
        };
        const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
        Block block{.with_positions = chance(20), .with_residual = chance(30), .seed = seed};
        DecodeBlockProblem& p = block.problem;
        p.dtype = GetParam() == DeviceType::cpu && chance(40) ? DType::fp32 : DType::bf16;
        p.weights_dtype = chance(50) ? p.dtype : DType::bf16;
        p.batch = pick({1, 1, 2, 3, 4, 5, 6, 7, 8});
        p.heads_kv = pick({1, 1, 2, 3});
        // A split has 16 query heads: larger groups have several splits of the same keys.
        const std::int64_t group = p.heads_kv == 1 ? pick({1, 2, 4, 8, 17, 32, 40}) : pick({1, 2, 4, 5, 8});
        p.heads_q = p.heads_kv * group;
        batches.insert(p.batch);
        groups.insert(group);
        p.head_dim = GetParam() == DeviceType::cpu ? pick({40, 64, 64, 128}) : pick({64, 128});
        p.hidden = pick({64, 320, 512, 1024, 1000});
        p.page_size = pick({0, 1, 3, 16, 16, 784});
        const std::int64_t most = pick({20, 100, 300, 1100});
        p.capacity = p.page_size == 0 ? most : (most + p.page_size - 1) / p.page_size * p.page_size;
        p.cache_batch_index = p.page_size == 0 && chance(50);
        p.left_padding = chance(20);
        if (chance(30)) p.window_left = pick({0, 7, 64, 200});
        if (chance(20)) p.softcap = 15;
        if (chance(20)) p.scale = 0.2;
        p.sinks = chance(30);
        p.qkv_bias = chance(40);
        p.out_bias = chance(30);
        p.qk_norm = chance(40);
        if (chance(80)) p.rotary_dim = chance(75) ? p.head_dim : p.head_dim / 2;
        p.rotary_interleaved = chance(30);
        block.with_positions = block.with_positions && p.rotary_dim > 0;
        for (std::int64_t b = 0; b < p.batch; ++b) {
            const auto capacity = static_cast<std::uint64_t>(p.capacity);
            const std::int64_t length =
                chance(20) ? pick({0, 0, p.capacity - 1}) : static_cast<std::int64_t>(random() % capacity);
            block.lengths.push_back(static_cast<std::int32_t>(length));
            block.padding.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(length + 1)));
        }
        const std::vector<DecodeBlockPlan> plans = plans_of(p);
        refused += plans.empty() ? 1 : 0;
        expect_right_in_every_way(block, plans);
        if (HasFatalFailure()) return;
    }
    EXPECT_LE(refused, kCases / 2) << "of " << kCases;
    EXPECT_EQ(batches, (std::set<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(groups, (std::set<std::int64_t>{1, 2, 4, 5, 8, 17, 32, 40}));
}

/// Attention blocks of Llama 3.2 1B and of Qwen3 0.6B, of Llama 3.1 8B with a quarter of its heads, and the widest, by
/// one launch on a GPU with 227 KiB of shared memory for up to 6 sequences.
TEST_P(DecodeBlock, is_right_for_the_shapes_of_models) {
    for (const auto& [hidden, heads_q, heads_kv, head_dim, batch, qk_norm] : {std::tuple(2048, 32, 8, 64, 1, false),
                                                                              {4096, 8, 2, 128, 1, false},
                                                                              {1024, 16, 8, 128, 2, true},
                                                                              {8192, 4, 1, 128, 1, false},
                                                                              {8192, 4, 1, 128, 6, false},
                                                                              {8192, 4, 1, 128, 8, false}}) {
        Block block{.seed = static_cast<std::uint64_t>(hidden + batch)};
        DecodeBlockProblem& p = block.problem;
        p.batch = batch;
        p.hidden = hidden, p.heads_q = heads_q, p.heads_kv = heads_kv;
        p.head_dim = p.rotary_dim = head_dim;
        p.qk_norm = qk_norm;
        p.page_size = 16, p.capacity = 160;
        block.lengths.assign(static_cast<std::size_t>(batch), 150);
        const std::vector<DecodeBlockPlan> plans = plans_of(p);
        ASSERT_FALSE(plans.empty());
        expect_right_in_every_way(block, plans);
    }
}

/// More than 16 splits: the sums over three segments of them and more are added in order, in one pass of the lanes at
/// head_dim 64 (8 segments) and in two at 128 (4).
TEST_P(DecodeBlock, is_right_with_many_splits) {
    for (const std::int64_t head_dim : {64, 128}) {
        Block block{.seed = static_cast<std::uint64_t>(head_dim)};
        DecodeBlockProblem& p = block.problem;
        p.batch = 2, p.hidden = 64, p.heads_q = 2, p.heads_kv = 1, p.head_dim = p.rotary_dim = head_dim;
        p.page_size = 64, p.capacity = 20032, p.sinks = true;
        block.lengths = {20000, 9000};
        const std::vector<DecodeBlockPlan> plans = plans_of(p);
        ASSERT_FALSE(plans.empty());
        expect_right_in_every_way(block, plans);
    }
}

/// A row's results, wherever it runs.
struct RowBits {
    std::vector<std::uint64_t> out, o, lse;
    friend bool operator==(const RowBits&, const RowBits&) = default;
};

RowBits bits_of_row(const Block& block, std::int64_t b) {
    RowBits bits;
    const DecodeBlockProblem& p = block.problem;
    for (std::int64_t i = 0; i < p.hidden; ++i) bits.out.push_back(std::bit_cast<std::uint64_t>(block.out.at(b, i)));
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
        bits.lse.push_back(std::bit_cast<std::uint64_t>(block.lse.at(b, h)));
        for (std::int64_t c = 0; c < p.head_dim; ++c)
            bits.o.push_back(std::bit_cast<std::uint64_t>(block.o.at(b, h, c)));
    }
    return bits;
}

/// Rows 1, 4 and 7 of a batch of 8 in pages of 16, with other rows beside them, in other layouts, on other threads.
TEST_P(DecodeBlock, bits_depend_on_the_row_alone) {
    Block block{.seed = 5};
    DecodeBlockProblem& p = block.problem;
    p.hidden = 1000, p.heads_q = 8, p.heads_kv = 2, p.head_dim = p.rotary_dim = 64;
    if (GetParam() == DeviceType::cuda) p.hidden = 1024;
    p.batch = 8, p.page_size = 16, p.capacity = 1104;
    block.lengths = {0, 1087, 5, 64, 640, 33, 1100, 1024};
    block.make();
    const auto plan = plan_of(p);
    ASSERT_TRUE(plan);
    Block whole = block;
    decode_block_case::run(*plan, whole.args());
    for (const std::int64_t page : {0, 1, 3, 16, 784}) {
        for (const std::int64_t b : {1, 4, 7}) {
            for (const int threads : {1, 0}) {
                // A batch of one row whose tensors hold the row of the batch of 8.
                Block alone = block;
                alone.problem.batch = 1;
                alone.problem.page_size = page;
                alone.problem.capacity = page == 0 ? 1100 : (1104 + page - 1) / page * page;
                alone.lengths = {block.length(b)};
                alone.make();
                alone.w_qkv = block.w_qkv, alone.w_o = block.w_o, alone.norm = block.norm;
                for (std::int64_t i = 0; i < p.hidden; ++i) alone.x.set(block.x.at(b, i), 0, i);
                for (std::int64_t row = 0; row < block.length(b); ++row) {
                    const auto [to, to_row] = alone.place(0, row);
                    const auto [from, from_row] = block.place(b, row);
                    for (std::int64_t h = 0; h < p.heads_kv; ++h) {
                        for (std::int64_t c = 0; c < p.head_dim; ++c) {
                            alone.k_cache.set(block.k_cache.at(from, from_row, h, c), to, to_row, h, c);
                            alone.v_cache.set(block.v_cache.at(from, from_row, h, c), to, to_row, h, c);
                        }
                    }
                }
                const auto plan_alone = plan_of(alone.problem, {.threads = threads});
                ASSERT_TRUE(plan_alone);
                decode_block_case::run(*plan_alone, alone.args());
                EXPECT_EQ(bits_of_row(alone, 0), bits_of_row(whole, b)) << "row " << b << ", pages of " << page;
            }
        }
    }
}

/// Lengths below 0 and at the capacity have no place for a new key, as in append().
TEST_P(DecodeBlock, keys_without_a_place_are_not_written) {
    for (const std::int64_t page : {0, 16}) {
        Block block{.seed = 9};
        DecodeBlockProblem& p = block.problem;
        p.hidden = 256, p.heads_q = 4, p.heads_kv = 2, p.rotary_dim = 64;
        p.batch = 5, p.page_size = page, p.capacity = 64;
        block.lengths = {-1, 63, 64, 1000, std::numeric_limits<std::int32_t>::min()};
        expect_right_in_every_way(block, plans_of(p));
    }
}

TEST_P(DecodeBlock, out_may_be_x_or_the_residual) {
    Block block{.seed = 3};
    DecodeBlockProblem& p = block.problem;
    p.hidden = 512, p.heads_q = 8, p.heads_kv = 2, p.rotary_dim = 64, p.batch = 3, p.capacity = 40;
    block.lengths = {3, 39, 0};
    block.make();
    for (const DecodeBlockPlan& plan : plans_of(p)) {
        for (const bool with_residual : {false, true}) {
            Block apart = block, in_place = block;
            for (Block* b : {&apart, &in_place}) {
                if (with_residual) b->residual = b->out, test::fill(b->residual, 0.5);
            }
            decode_block_case::run(plan, apart.args());
            DecodeBlockArgs args = in_place.args();
            args.out = with_residual ? args.residual : args.x;
            decode_block_case::run(plan, args);
            EXPECT_EQ((with_residual ? in_place.residual : in_place.x).bytes(), apart.out.bytes());
        }
    }
}

/// A step after a step: the new key of the first call is a key of the second.
TEST_P(DecodeBlock, steps_follow_each_other) {
    Block block{.seed = 12};
    DecodeBlockProblem& p = block.problem;
    p.hidden = 256, p.heads_q = 4, p.heads_kv = 1, p.rotary_dim = 64, p.batch = 2, p.capacity = 32, p.page_size = 16;
    block.lengths = {31, 31};  // pages for all steps
    block.make();
    block.lengths = {0, 14};
    const Block begin = block;
    for (const DecodeBlockPlan& plan : plans_of(p)) {
        block = begin;
        for (int step = 0; step < 5; ++step) {
            for (std::int64_t b = 0; b < p.batch; ++b) *block.kv_lengths.view().at<std::int32_t>(b) = block.length(b);
            const Block before = block;
            decode_block_case::run(plan, block.args());
            decode_block_case::expect_right(block, before);
            for (std::int32_t& length : block.lengths) ++length;
            block.x = block.out;
            block.clear_outputs();
        }
    }
}

std::string name_of_device(const testing::TestParamInfo<DeviceType>& which) {
    return which.param == DeviceType::cpu ? "cpu" : "cuda";
}

INSTANTIATE_TEST_SUITE_P(AllDevices, DecodeBlock, testing::Values(DeviceType::cpu, DeviceType::cuda), name_of_device);

}  // namespace
}  // namespace tessera::kernels_test::decode_block_test
