// SPDX-License-Identifier: Apache-2.0
//
// Predictions of cuda.decode.forward, and of prompts on a cache by cuda.fa3.forward: which kernel a prediction is of,
// and what its time follows.
#include <gtest/gtest.h>

#include <numeric>

#include "measure/accuracy.hpp"
#include "model/gpu.hpp"
#include "plan_on.hpp"
#include "registry.hpp"
#include "tessera/error.hpp"

namespace tessera::model::decode_test {
namespace {

/// A cache of `batch` sequences in the H200's memory.
Problem cache(std::int64_t batch, std::int64_t capacity, std::int64_t page = 0) {
    Problem p{.dtype = DType::bf16, .batch = batch, .len_q = 1, .len_kv = capacity, .heads_q = 32, .heads_kv = 8};
    p.head_dim = p.head_dim_v = 128;
    p.kv_lengths = true;
    p.page_size = page;
    return p;
}

Prediction on_h200(const Problem& p, PredictOptions how = {}) {
    how.by = "tessera";
    return predict(p, Schedule::fa2, Pass::forward, *find_machine("h200"), how);
}

TEST(Decode, is_predicted_at_the_rate_of_memory) {
    for (const std::int64_t batch : {1, 8, 64}) {
        const Prediction p = on_h200(cache(batch, 4096));
        const double kv = 2.0 * static_cast<double>(batch) * 4096 * 8 * 128 * 2;
        EXPECT_GT(p.ms, kv / 4800e6);
        EXPECT_LT(p.ms, 0.02 + 1.2 * kv / 4000e6);
        EXPECT_NEAR(static_cast<double>(p.cost.work.bytes.dram), kv, 0.02 * kv);
        const double sum = std::accumulate(p.parts.begin(), p.parts.end(), 0.0,
                                           [](double before, const Part& part) { return before + part.ms; });
        EXPECT_NEAR(sum, p.ms, 1e-9);
    }
}

TEST(Decode, is_the_kernel_that_plan_prefers) {
    Problem p = cache(1, 8192);
    p.kv_lengths = false;
    const Prediction preferred = on_h200(p), decode = on_h200(p, {.kernel = "cuda.decode.forward"});
    const Prediction unsplit = on_h200(p, {.kernel = "cuda.fa2.forward"});
    EXPECT_EQ(preferred.ms, decode.ms);
    EXPECT_EQ(preferred.tile, (Tile{16, 64}));
    EXPECT_GT(unsplit.ms, 2 * decode.ms);
    EXPECT_EQ(on_h200(p, {.tile = unsplit.tile}).ms, unsplit.ms);
    EXPECT_NE(decode.fitted_on, unsplit.fitted_on);
}

TEST(Decode, pages_take_longer_and_free_slots_take_memory_alone) {
    const PredictOptions lengths{.sequences = std::vector<std::pair<std::int64_t, std::int64_t>>(32, {1, 4096})};
    const Prediction slots = on_h200(cache(32, 4096), lengths), pages = on_h200(cache(32, 4096, 16), lengths);
    EXPECT_GT(pages.ms, 1.05 * slots.ms);
    EXPECT_EQ(pages.ms, on_h200(cache(32, 4096, 784 / 49), lengths).ms);
    const Prediction large = on_h200(cache(32, 65536, 16), lengths);
    EXPECT_EQ(large.ms, pages.ms);
    EXPECT_GT(large.memory.workspace, 4 * pages.memory.workspace);
}

TEST(Decode, sequences_have_their_own_keys) {
    const auto with = [](std::vector<std::pair<std::int64_t, std::int64_t>> sequences) {
        return on_h200(cache(2, 65536), {.sequences = std::move(sequences)});
    };
    // The bytes are equal; the long row has more splits to combine.
    EXPECT_GT(with({{1, 65000}, {1, 536}}).ms, with({{1, 32768}, {1, 32768}}).ms);
    EXPECT_EQ(with({{1, 65000}, {1, 536}}).cost.work.bytes.dram, with({{1, 32768}, {1, 32768}}).cost.work.bytes.dram);
    EXPECT_LT(with({{1, 0}, {1, 0}}).ms, 0.02);
}

TEST(Decode, rows_beyond_a_tile_read_the_keys_again_from_the_l2) {
    Problem p = cache(1, 32768);
    p.heads_q = 64;
    p.mask.causal = Causal::bottom_right;
    const Prediction one = on_h200(p);
    p.len_q = 16;  // 128 rows of a kv head: two tiles of 64
    const Prediction many = on_h200(p);
    EXPECT_GT(many.ms, 1.5 * one.ms);
    EXPECT_LT(static_cast<double>(many.cost.work.bytes.dram), 1.02 * static_cast<double>(one.cost.work.bytes.dram));
}

/// A chunk of 2,048 queries behind 6,144 keys, one sequence.
Problem chunk(bool cached, std::int64_t page = 0, std::int64_t head_dim = 128) {
    Problem p = cache(1, 8192, page);
    p.kv_lengths = cached;
    p.head_dim = p.head_dim_v = head_dim;
    p.len_q = 2048;
    p.mask.causal = Causal::bottom_right;
    return p;
}

Prediction by_fa3(const Problem& p, PredictOptions how = {}) {
    how.by = "tessera";
    return predict(p, Schedule::fa3, Pass::forward, *find_machine("h200"), how);
}

TEST(CachedPrompts, by_fa3_take_as_long_in_slots_as_without_a_cache) {
    EXPECT_DOUBLE_EQ(by_fa3(chunk(true)).ms, by_fa3(chunk(false)).ms);
    EXPECT_EQ(by_fa3(chunk(true), {.kernel = "cuda.fa3.forward"}).ms, by_fa3(chunk(true)).ms);
    EXPECT_GT(on_h200(chunk(true)).ms, 2 * by_fa3(chunk(true)).ms) << "by cuda.decode.forward";
    // A cache with room for more keys takes the time of those that it holds.
    Problem roomy = chunk(true);
    roomy.len_kv = 65536;
    EXPECT_DOUBLE_EQ(by_fa3(roomy, {.sequences = {{2048, 8192}}}).ms, by_fa3(chunk(false)).ms);
}

TEST(CachedPrompts, on_pages_take_longer_the_more_boxes_a_block_has) {
    const double slots = by_fa3(chunk(true)).ms;
    double before = slots;
    for (const std::int64_t page : {256, 64, 16, 8}) {
        const Prediction p = by_fa3(chunk(true, page));
        EXPECT_GT(p.ms, before) << page;
        before = p.ms;
    }
    EXPECT_EQ(by_fa3(chunk(true, 1024)).ms, by_fa3(chunk(true, 256)).ms) << "one box either way";
    for (const PagesTime& row : kPagesInFa3) {
        const auto page = static_cast<std::int64_t>(128 / row.boxes);
        EXPECT_NEAR(by_fa3(chunk(true, page)).ms / slots, row.factor, 0.05 * row.factor) << page;
    }
    EXPECT_DOUBLE_EQ(pages_factor(kPagesInFa3[0].boxes), kPagesInFa3[0].factor);
    EXPECT_DOUBLE_EQ(pages_factor(kPagesInFa3[1].boxes), kPagesInFa3[1].factor);
}

TEST(CachedPrompts, have_the_tiles_and_the_padding_of_the_shapes_for_a_cache) {
    EXPECT_EQ(by_fa3(chunk(true, 0, 64)).tile, (Tile{128, 128}));
    Problem sinks_aside = chunk(false, 0, 64);
    EXPECT_EQ(by_fa3(sinks_aside).tile, (Tile{192, 128}));
    EXPECT_EQ(by_fa3(chunk(true, 0, 96)).ms, by_fa3(chunk(true, 0, 104)).ms) << "both are padded to 128";
    EXPECT_LT(by_fa3(chunk(false, 0, 96)).ms, by_fa3(chunk(false, 0, 104)).ms);
    EXPECT_EQ(by_fa3(chunk(true, 0, 192)).tile, (Tile{128, 64}));
}

TEST(CachedPrompts, sequences_have_their_own_keys) {
    Problem p = chunk(true, 256);
    p.batch = 2, p.len_kv = 65536;
    const double even = by_fa3(p, {.sequences = {{2048, 8192}, {2048, 8192}}}).ms;
    const double uneven = by_fa3(p, {.sequences = {{2048, 2048}, {2048, 14336}}}).ms;
    EXPECT_GT(uneven, 0.9 * even);
    EXPECT_LT(uneven, 1.3 * even);
    EXPECT_GT(by_fa3(p, {.sequences = {{2048, 8192}, {2048, 16384}}}).ms, 1.3 * even);
}

TEST(CachedPrompts, are_those_of_the_decode_kernel_unless_fa3_is_named) {
    const Problem p = chunk(true, 16);
    const auto chosen = [&](PlanOptions options) {
        options.pass = Pass::forward;
        const PlanOn plan = plan_on(*find_machine("h200"), p, options, {});
        return plan.chosen() == nullptr ? Candidate{} : *plan.chosen();
    };
    EXPECT_EQ(chosen({}).kernel, kDecodeKernel);
    EXPECT_EQ(chosen({}).predicted->ms, on_h200(p).ms);
    const Candidate named = chosen({.schedule = Schedule::fa3});
    EXPECT_EQ(named.kernel, "cuda.fa3.forward");
    ASSERT_TRUE(named.predicted.has_value());
    EXPECT_EQ(named.predicted->ms, by_fa3(p).ms);
    EXPECT_EQ(named.tile, (Tile{128, 128}));
    EXPECT_EQ(named.predicted->error, 0.3);
    EXPECT_EQ(measure::error_bar_text(p, *named.predicted, *find_machine("h200")),
              "+-30 %, for calls on a cache by fa3, of which there are no held-out rows");
}

TEST(CachedPrompts, refusals_name_what_fa3_does_not_take) {
    const auto reason = [](Problem p, const char* machine = "h200") {
        return refusal(p, Schedule::fa3, Pass::forward, *find_machine(machine), {.by = "tessera"}).value_or("");
    };
    EXPECT_EQ(reason(chunk(true, 16)), "");
    EXPECT_EQ(reason(chunk(true, 12)), "takes pages of a multiple of 8 keys, got 12");
    Problem capped = chunk(true);
    capped.softcap = 30;
    EXPECT_EQ(reason(capped), "takes softcap, ALiBi, biases, dropout and scales of 0 and less without a cache only");
    Problem padded = chunk(true, 16);
    padded.left_padding = true;
    EXPECT_EQ(reason(padded), "takes no left_padding with pages");
    EXPECT_EQ(reason(chunk(true), "a100"), "needs compute capability 9.0, a100 has 8.0");
}

TEST(Decode, refusals_name_the_reason) {
    const auto reason = [](const Problem& p, const char* machine, PredictOptions how = {}) {
        how.by = "tessera";
        return refusal(p, Schedule::fa2, Pass::forward, *find_machine(machine), how).value_or("");
    };
    Problem wide = cache(1, 4096);
    wide.head_dim = wide.head_dim_v = 256;
    EXPECT_EQ(reason(wide, "h200"), "");
    EXPECT_NE(reason(wide, "a100").find("bytes of shared memory for head_dim 256, a100 has"), std::string::npos);
    EXPECT_NE(reason(cache(1, 4096), "rtx4090").find("bytes of shared memory"), std::string::npos);
    EXPECT_EQ(reason(cache(1, 4096), "a100"), "");
    EXPECT_EQ(reason(cache(1, 4096), "h200", {.kernel = "cuda.fa2.forward"}), "takes no cache of keys");
    EXPECT_EQ(reason(cache(1, 4096), "h200", {.tile = Tile{128, 128}}), "is compiled for tiles of 16 x 64");
    EXPECT_EQ(reason(cache(1, 4096), "h200", {.kernel = "cuda.fa3.forward"}),
              "expected a kernel of fa2 forward, got cuda.fa3.forward");
    EXPECT_EQ(reason(cache(1, 4096), "h200", {.kernel = "cuda.fa9"}),
              "expected a CUDA kernel of tessera, got cuda.fa9");
}

TEST(Decode, plan_knows_its_workspace) {
    const PlanOn plan = plan_on(*find_machine("h200"), cache(256, 131072), {.pass = Pass::forward}, {});
    ASSERT_NE(plan.chosen(), nullptr);
    EXPECT_EQ(plan.chosen()->kernel, "cuda.decode.forward");
    EXPECT_GT(plan.chosen()->workspace_bytes, std::int64_t{400} << 20);
    EXPECT_LE(plan.chosen()->workspace_bytes, std::int64_t{512} << 20);
    for (const Kernel& kernel : registry()) {  // in builds that have it
        if (kernel.info.name != kDecodeKernel) continue;
        for (const Problem& problem : {cache(3, 5000), cache(256, 131072)}) {
            const Plan own{.problem = problem, .pass = Pass::forward, .kernel = &kernel.info};
            EXPECT_EQ(static_cast<std::int64_t>(kernel.workspace_bytes(own)), decode_workspace(problem));
        }
    }
}

}  // namespace
}  // namespace tessera::model::decode_test
