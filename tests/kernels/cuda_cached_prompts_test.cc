// SPDX-License-Identifier: Apache-2.0
//
// Prompts whose keys are in slots or pages of a cache, on the CUDA kernels that take them. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "check/run_case.hpp"
#include "long_run.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_cached_prompts_test {
namespace {

constexpr std::uint64_t kSeed = 20261130;
constexpr int kGroup = 10;

/// A prompt, or a chunk of one, in pages that hold whole rows of a TMA box, or in slots. Entries of the table behind a
/// sequence are junk, and unused rows of the cache hold NaN.
Case drawn_prompt(std::uint64_t index, DType dtype) {
    std::mt19937_64 engine(random_seed(kSeed) * 1'000'003 + index);
    const auto between = [&](std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(engine);
    };
    const auto pick = [&](std::initializer_list<std::int64_t> list) {
        return list.begin()[between(0, static_cast<std::int64_t>(list.size()) - 1)];
    };
    Case c{.id = std::to_string(index), .seed = kSeed + index};
    Problem& p = c.problem;
    p.dtype = dtype;
    p.heads_kv = pick({1, 1, 2, 3});
    p.heads_q = p.heads_kv * pick({1, 2, 4, 5, 8, 16});
    p.head_dim = pick({8, 40, 64, 96, 128, 128, 192, 256});
    p.head_dim_v = between(0, 4) > 0 ? p.head_dim : pick({8, 56, 64, 128});
    p.len_q = between(0, 2) == 0 ? between(1, 64) : between(65, 700);
    const std::int64_t most = pick({70, 300, 1040, 2100}), batch = between(1, 4);
    const std::int64_t page = pick({0, 8, 16, 16, 24, 64, 128, 256, 784, 1056});
    p.len_kv = page == 0 ? most : (most + page - 1) / page * page;
    std::vector<std::int64_t> lengths, padding, queries;
    const bool padded = page == 0 && between(0, 2) == 0, ragged = between(0, 2) == 0;
    for (std::int64_t b = 0; b < batch; ++b) {
        lengths.push_back(between(0, 9) == 0 ? between(-1, 1) : between(0, most));
        if (padded) padding.push_back(between(0, std::max<std::int64_t>(lengths.back(), 0)));
        if (ragged) queries.push_back(between(0, p.len_q));
    }
    c.set_cache(page, lengths, padding);
    c.cache_layout = static_cast<CacheLayout>(between(0, 4));
    if (ragged) c.set_queries(queries);
    p.mask.causal = between(0, 3) == 0 ? Causal::none : between(0, 3) == 0 ? Causal::top_left : Causal::bottom_right;
    if (between(0, 3) == 0) p.mask.window_left = pick({0, 17, 100, 1000});
    if (between(0, 9) == 0) p.mask.window_right = pick({0, 3, 200});
    p.sinks = between(0, 3) == 0;
    c.lse = between(0, 9) > 0;
    c.layout = between(0, 1) == 0 ? Layout::bshd : Layout::bhsd;
    c.q = between(0, 4) == 0 ? Fill::outliers : Fill::normal;
    c.v = between(0, 4) == 0 ? Fill::outliers : Fill::normal;
    return c;
}

class CudaCachedPrompts : public testing::TestWithParam<std::tuple<const char*, DType, int>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaCachedPrompts, are_right) {
    const auto [name, dtype, first] = GetParam();
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.name != name) continue;
        for (int i = first; i < first + kGroup; ++i) {
            const Case c = drawn_prompt(static_cast<std::uint64_t>(i), dtype);
            CaseRunner runner(c);
            const Outcome outcome = runner.run(kernel);
            EXPECT_FALSE(outcome.refusal) << c.describe() << "\n" << *outcome.refusal;
            EXPECT_TRUE(outcome.pass()) << c.describe() << "\n" << outcome.report.describe();
        }
    }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, CudaCachedPrompts,
                         testing::Combine(testing::Values("cuda.decode.forward", "cuda.fa3.forward"),
                                          testing::Values(DType::bf16, DType::fp16),
                                          testing::Range(0, long_run() ? 2000 : 100, kGroup)),
                         [](const auto& which) {
                             std::string name = std::get<0>(which.param);
                             std::replace(name.begin(), name.end(), '.', '_');
                             return name + "_" + std::string(name_of(std::get<1>(which.param))) + "_" +
                                    std::to_string(std::get<2>(which.param));
                         });

}  // namespace
}  // namespace tessera::check::cuda_cached_prompts_test
