// SPDX-License-Identifier: Apache-2.0
//
// decode_block(): fields, options and tensors that break the contract are refused with their names, and a call that
// throws has changed nothing. kernels/decode_block_test.cc tests the results.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "kernels/decode_block_case.hpp"
#include "tessera/error.hpp"

namespace tessera::decode_block_calls_test {
namespace {

using decode_block_case::Block;

/// Every tensor is given but for cache_batch_index.
Block whole_block(std::int64_t page_size = 4) {
    Block block{.problem = {}, .lengths = {2, 7}, .padding = {1, 0}, .with_residual = true, .seed = 4};
    DecodeBlockProblem& p = block.problem;
    p.dtype = p.weights_dtype = DType::fp32;
    p.batch = 2, p.hidden = 16, p.heads_q = 4, p.heads_kv = 2, p.head_dim = 8;
    p.capacity = 8, p.page_size = page_size;
    p.left_padding = p.sinks = p.qkv_bias = p.out_bias = p.qk_norm = true;
    p.rotary_dim = 4;
    p.cache_batch_index = page_size == 0;
    block.make();
    return block;
}

void expect_error(const std::string& argument, const std::string& words, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << "expected an error about " << argument;
    } catch (const Error& error) {
        EXPECT_EQ(error.argument(), argument) << error.what();
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
}

/// The call with changed tensors throws, and writes nothing.
void expect_refused(const std::string& argument, const std::string& words,
                    const std::function<void(DecodeBlockArgs&)>& change, std::int64_t page_size = 4) {
    SCOPED_TRACE(argument + ": " + words);
    Block block = whole_block(page_size);
    const Block before = block;
    DecodeBlockArgs args = block.args();
    change(args);
    const DecodeBlockPlan plan = decode_block_plan(block.problem);
    expect_error(argument, words, [&] { decode_block_case::run(plan, args); });
    EXPECT_EQ(block.k_cache.bytes(), before.k_cache.bytes());
    EXPECT_EQ(block.v_cache.bytes(), before.v_cache.bytes());
    EXPECT_EQ(block.out.bytes(), before.out.bytes());
    EXPECT_EQ(block.o.bytes(), before.o.bytes());
    EXPECT_EQ(block.lse.bytes(), before.lse.bytes());
}

TEST(DecodeBlockCalls, fields_are_checked) {
    const auto refused = [](const char* field, const char* words, const auto& change) {
        SCOPED_TRACE(field);
        DecodeBlockProblem p = whole_block().problem;
        change(p);
        expect_error(field, words, [&] { decode_block_plan(p); });
    };
    using Problem = DecodeBlockProblem;
    refused("dtype", "expected bf16 or fp32, got fp16", [](Problem& p) { p.dtype = DType::fp16; });
    refused("weights_dtype", "expected bf16 or fp32", [](Problem& p) { p.weights_dtype = DType::fp16; });
    refused("weights_dtype", "expected bf16, got fp32", [](Problem& p) { p.dtype = DType::bf16; });
    refused("batch", "got -1", [](Problem& p) { p.batch = -1; });
    refused("hidden", "got 0", [](Problem& p) { p.hidden = 0; });
    refused("heads_q", "multiple of heads_kv = 2, got 3", [](Problem& p) { p.heads_q = 3; });
    refused("heads_kv", "got 0", [](Problem& p) { p.heads_kv = 0; });
    refused("head_dim", "got 300", [](Problem& p) { p.head_dim = 300; });
    refused("capacity", "multiple of page_size = 4, got 9", [](Problem& p) { p.capacity = 9; });
    refused("capacity", "got 0", [](Problem& p) { p.capacity = 0; });
    refused("page_size", "got -1", [](Problem& p) { p.page_size = -1; });
    refused("rotary_dim", "even", [](Problem& p) { p.rotary_dim = 3; });
    refused("rotary_dim", "expected 0..8, got 10", [](Problem& p) { p.rotary_dim = 10; });
    refused("norm_eps", "got -1", [](Problem& p) { p.norm_eps = -1; });
    refused("softcap", "got -1", [](Problem& p) { p.softcap = -1; });
    refused("window_left", "got -1", [](Problem& p) { p.window_left = -1; });
    refused("cache_batch_index", "pages", [](Problem& p) { p.cache_batch_index = true; });
}

TEST(DecodeBlockCalls, options_are_checked) {
    const DecodeBlockProblem p = whole_block().problem;
    expect_error("threads", "got -1", [&] { decode_block_plan(p, {.threads = -1}); });
    expect_error("way", "CUDA kernel", [&] { decode_block_plan(p, {.way = DecodeBlockWay::one_launch}); });
    const DecodeBlockPlan plan = decode_block_plan(p);
    EXPECT_EQ(plan.way, DecodeBlockWay::chain);
    EXPECT_NE(plan.describe().find("not one launch: it is a CUDA kernel"), std::string::npos) << plan.describe();
    EXPECT_TRUE(decode_block_plan(p, {.way = DecodeBlockWay::chain}).refused.empty());
    EXPECT_NE(DecodeBlockPlan{}.describe().find("not made by decode_block_plan()"), std::string::npos);
}

TEST(DecodeBlockCalls, tensors_are_checked) {
    using Args = DecodeBlockArgs;
    for (TensorView Args::*view :
         {&Args::x, &Args::norm, &Args::w_qkv, &Args::b_qkv, &Args::q_norm, &Args::k_norm, &Args::rotary_cos,
          &Args::rotary_sin, &Args::k_cache, &Args::v_cache, &Args::kv_lengths, &Args::page_table, &Args::left_padding,
          &Args::sinks, &Args::w_o, &Args::b_o, &Args::out}) {
        const auto named = std::find_if(kDecodeBlockTensors.begin(), kDecodeBlockTensors.end(),
                                        [&](const DecodeBlockTensor& t) { return t.view == view; });
        expect_refused(named->name, "got nothing", [&](Args& a) { a.*view = {}; });
        expect_refused(named->name, "expected dtype", [&](Args& a) { (a.*view).dtype = DType::int8; });
        expect_refused(named->name, "host memory", [&](Args& a) { (a.*view).device = {DeviceType::cuda, 0}; });
        expect_refused(named->name, "null", [&](Args& a) { (a.*view).data = nullptr; });
    }
    expect_refused("x", "shape [2, 16]", [](Args& a) { a.x.shape[1] = 15; });
    expect_refused("residual", "shape [2, 16]", [](Args& a) { a.residual.shape[0] = 1; });
    expect_refused("w_qkv", "shape [64, 16]", [](Args& a) { a.w_qkv.shape[0] = 63; });
    expect_refused("w_o", "shape [16, 32]", [](Args& a) { a.w_o.shape[1] = 16; });
    expect_refused("w_qkv", "contiguous rows", [](Args& a) { a.w_qkv.strides = {1, 64}; });
    expect_refused("x", "contiguous rows", [](Args& a) { a.x.strides = {1, 2}; });
    expect_refused("o", "packed", [](Args& a) { a.o.strides[0] = 64; });
    expect_refused("lse", "shape [2, 4]", [](Args& a) { a.lse.rank = 1; });
    expect_refused("cache_batch_index", "is not set", [](Args& a) { a.cache_batch_index = a.kv_lengths; });
    expect_refused(
        "page_table", "is not set", [](Args& a) { a.page_table = a.kv_lengths; }, 0);
    expect_refused(
        "k_cache", "shape [4, 8, 2, 8]", [](Args& a) { a.k_cache.shape[1] = 4; }, 0);
}

TEST(DecodeBlockCalls, memory_is_checked) {
    using Args = DecodeBlockArgs;
    expect_refused("out", "expected memory of its own, got memory that overlaps x",
                   [](Args& a) { a.out.data = a.x.at<float>(0, 1); });
    expect_refused("out", "expected memory of its own, got memory that overlaps w_o",
                   [](Args& a) { a.out.data = a.w_o.data; });
    expect_refused("out", "distinct", [](Args& a) { a.out.strides[0] = 0; });
    expect_refused("k_cache", "expected memory of its own, got memory that overlaps out",
                   [](Args& a) { a.out.data = a.k_cache.data; });
    expect_refused("v_cache", "share no memory", [](Args& a) { a.v_cache.data = a.k_cache.data; });
    expect_refused("o", "expected memory of its own, got memory that overlaps lse",
                   [](Args& a) { a.lse.data = a.o.data; });
    Block block = whole_block();
    const DecodeBlockPlan plan = decode_block_plan(block.problem);
    const Workspace workspace(plan.workspace_bytes);
    const auto call = [&](std::span<std::byte> memory) {
        return [&, memory] { decode_block(plan, block.args(), memory); };
    };
    expect_error("workspace", "expected", call(workspace.span().first(plan.workspace_bytes - 1)));
    expect_error("workspace", "aligned", call({workspace.span().data() + 4, plan.workspace_bytes}));
    expect_error("workspace", "expected", call({}));
    DecodeBlockArgs inside = block.args();
    inside.out.data = workspace.span().data();
    expect_error("workspace", "expected memory of its own, got memory that overlaps out",
                 [&] { decode_block(plan, inside, workspace.span()); });
}

TEST(DecodeBlockCalls, values_in_host_memory_are_checked) {
    using Args = DecodeBlockArgs;
    expect_refused("page_table", "expected pages", [](Args& a) { *a.page_table.at<std::int32_t>(0, 0) = -1; });
    expect_refused(
        "cache_batch_index", "expected slots", [](Args& a) { *a.cache_batch_index.at<std::int32_t>(1) = 4; }, 0);
    test::Tensor positions(DType::int32, {2});
    *positions.view().at<std::int32_t>(1) = 8;
    expect_refused("positions", "from 0 to 7", [&](Args& a) { a.positions = positions; });
}

TEST(DecodeBlockCalls, plans_that_were_changed_are_refused) {
    Block block = whole_block();
    const DecodeBlockPlan plan = decode_block_plan(block.problem);
    for (const auto& change : std::initializer_list<std::function<void(DecodeBlockPlan&)>>{
             [](DecodeBlockPlan& p) { p.attention = {}; },
             [](DecodeBlockPlan& p) { p.way = DecodeBlockWay::one_launch; },
             [](DecodeBlockPlan& p) { p.problem.heads_q = 2; }, [](DecodeBlockPlan& p) { p.workspace_bytes = 64; },
             [](DecodeBlockPlan& p) { p.threads = 0; }}) {
        DecodeBlockPlan changed = plan;
        change(changed);
        expect_error("plan", "decode_block_plan()", [&] { decode_block_case::run(changed, block.args()); });
    }
}

TEST(DecodeBlockCalls, a_batch_of_0_does_nothing) {
    Block block = whole_block();
    block.problem.batch = 0;
    block.lengths.clear(), block.padding.clear();
    block.make();
    decode_block_case::run(decode_block_plan(block.problem), block.args());
}

}  // namespace
}  // namespace tessera::decode_block_calls_test
