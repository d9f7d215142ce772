// SPDX-License-Identifier: Apache-2.0
//
// Predictions of cuda.decode.forward: which kernel a prediction is of, and what its time follows.
#include <gtest/gtest.h>

#include <numeric>

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
