// SPDX-License-Identifier: Apache-2.0
//
// cuda.decode.forward: few queries, caches in slots and pages, sinks, and bits that depend on the row alone. Skipped
// without a GPU.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <tuple>

#include "check/run_case.hpp"
#include "kernels/row_bits.hpp"
#include "long_run.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_decode_test {
namespace {

constexpr std::uint64_t kSeed = 20261128;
constexpr int kGroup = 25;

KernelInfo decode_kernel() {
    for (const KernelInfo& kernel : kernels())
        if (kernel.name == "cuda.decode.forward") return kernel;
    return {};
}

class Draw {
 public:
    Draw(std::uint64_t seed, std::uint64_t index) : engine_(seed * 1'000'003 + index) {}
    std::int64_t between(std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
    }
    bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }
    template <class T>
    T pick(std::initializer_list<T> list) {
        return list.begin()[between(0, static_cast<std::int64_t>(list.size()) - 1)];
    }

 private:
    std::mt19937_64 engine_;
};

/// A call on a cache, or one of few queries: any page size, mask and group, with softcap, ALiBi and sinks now and then.
Case drawn_case(std::uint64_t index, DType dtype) {
    Draw draw(random_seed(kSeed), index);
    Case c{.id = std::to_string(index), .seed = kSeed + index};
    Problem& p = c.problem;
    p.dtype = dtype;
    p.heads_kv = draw.pick({1, 1, 2, 3});
    p.heads_q = p.heads_kv * draw.pick({1, 2, 4, 5, 7, 8, 12, 16, 33});
    p.head_dim = draw.pick({8, 40, 64, 64, 80, 96, 128, 128, 192, 256});
    p.head_dim_v = draw.chance(0.8) ? p.head_dim : draw.pick({8, 56, 64, 128});
    p.len_q = draw.chance(0.5) ? 1 : draw.chance(0.7) ? draw.between(1, 8) : draw.between(9, 90);
    const std::int64_t batch = draw.between(1, 5);
    const bool cache = p.len_q > 8 || draw.chance(0.8);
    const std::int64_t most = draw.pick({70, 300, 1040, 2100, 4200});
    if (cache) {
        const std::int64_t page = draw.pick({0, 1, 3, 5, 16, 64, 100, 784, 1056});
        p.len_kv = page == 0 ? most : (most + page - 1) / page * page;
        std::vector<std::int64_t> lengths, padding;
        const bool padded = draw.chance(0.3);
        for (std::int64_t b = 0; b < batch; ++b) {
            const bool over = draw.chance(0.05);  // the capacity
            lengths.push_back(over                ? p.len_kv + draw.between(1, 100)
                              : draw.chance(0.15) ? draw.between(-1, 1)
                                                  : draw.between(0, most));
            if (padded) padding.push_back(draw.between(0, std::max<std::int64_t>(lengths.back(), 0)));
        }
        c.set_cache(page, lengths, padding);
        c.cache_layout = static_cast<CacheLayout>(draw.between(0, 4));
        if (draw.chance(0.3)) {
            std::vector<std::int64_t> queries;
            for (std::int64_t b = 0; b < batch; ++b) queries.push_back(draw.between(0, p.len_q));
            c.set_queries(queries);
        }
    } else {
        p.batch = batch;
        p.len_kv = std::max<std::int64_t>(most, 512);
    }
    p.mask.causal = draw.pick({Causal::none, Causal::bottom_right, Causal::bottom_right, Causal::top_left});
    if (draw.chance(0.25)) p.mask.window_left = draw.pick({0, 17, 100, 1000});
    if (draw.chance(0.1)) p.mask.window_right = draw.pick({0, 3, 200});
    if (draw.chance(0.15)) p.softcap = 20;
    p.alibi = draw.chance(0.15);
    if (draw.chance(0.05)) p.scale = draw.pick({-0.1, 0.0, 1.0});
    p.sinks = draw.chance(0.25);
    c.sinks_of_all_sizes = draw.chance(0.5);
    c.lse = draw.chance(0.9);
    c.layout = draw.pick({Layout::bshd, Layout::bhsd});
    c.q = draw.chance(0.2) ? Fill::outliers : Fill::normal;
    c.v = draw.chance(0.2) ? Fill::outliers : Fill::normal;
    return c;
}

class CudaDecode : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

class CudaDecodeCases : public testing::TestWithParam<std::tuple<DType, int>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaDecodeCases, are_right) {
    const auto [dtype, first] = GetParam();
    const KernelInfo kernel = decode_kernel();
    for (int i = first; i < first + kGroup; ++i) {
        const Case c = drawn_case(static_cast<std::uint64_t>(i), dtype);
        CaseRunner runner(c);
        const Outcome outcome = runner.run(kernel);
        EXPECT_FALSE(outcome.refusal) << c.describe() << "\n" << *outcome.refusal;
        EXPECT_TRUE(outcome.pass()) << c.describe() << "\n" << outcome.report.describe();
    }
}

std::string name_of_group(const testing::TestParamInfo<std::tuple<DType, int>>& which) {
    return std::string(name_of(std::get<0>(which.param))) + "_" + std::to_string(std::get<1>(which.param));
}

INSTANTIATE_TEST_SUITE_P(AllKernels, CudaDecodeCases,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16),
                                          testing::Range(0, long_run() ? 5000 : 200, kGroup)),
                         name_of_group);

/// 1,024, 2,048 and 4,096 keys are where a row's splits become longer: neighbouring queries have other splits.
TEST_F(CudaDecode, a_row_has_the_same_bits_beside_any_queries_and_members) {
    constexpr std::int64_t kQueries = 8;
    const KernelInfo kernel = decode_kernel();
    for (const std::int64_t len : {700, 1028, 2052, 4099, 9000}) {
        for (const std::int64_t heads : {2, 8, 32}) {
            for (const std::int64_t dim : {64, 128, 192, 256}) {
                const DType dtype = heads == 8 || len == 700 ? DType::fp16 : DType::bf16;
                Problem p = make_problem(1, kQueries, len, heads, 2, dim, dtype);
                p.mask.causal = Causal::bottom_right;
                Attention whole(p);
                ASSERT_TRUE(whole.forward(kernel)) << p.describe();
                for (const std::int64_t n : {1, 2, 5}) {
                    for (std::int64_t first = 0; first + n <= kQueries; ++first)
                        expect_same_rows(whole, kernel, {first, n, len - kQueries + first + n}, first % 3 + 1);
                }
            }
        }
    }
}

TEST_F(CudaDecode, a_window_moves_with_the_queries) {
    constexpr std::int64_t kQueries = 8;
    const KernelInfo kernel = decode_kernel();
    for (const std::int64_t window : {70, 1023, 1500}) {
        Problem p = make_problem(1, kQueries, 5000, 8, 2, 128, DType::fp16);
        p.mask = {.causal = Causal::bottom_right, .window_left = window};
        Attention whole(p);
        ASSERT_TRUE(whole.forward(kernel)) << p.describe();
        for (std::int64_t first = 0; first < kQueries; ++first)
            expect_same_rows(whole, kernel, {first, 1, p.len_kv - kQueries + first + 1}, 2);
    }
}

/// The first tile of n queries has 28 splits: from key 127 on, its first row sees 1,023 + n keys in splits of 128, and
/// its last row 1,024 in splits of 64.
TEST_F(CudaDecode, a_tile_has_all_splits_of_two_lengths) {
    for (const auto& [dim, n] : {std::pair(64, 64), std::pair(128, 64), std::pair(192, 32), std::pair(256, 32)}) {
        Case c{.id = std::to_string(dim), .seed = kSeed};
        c.problem = make_problem(1, 128, 1150 + n, 1, 1, dim, DType::bf16);
        c.problem.mask.window_left = 895 + n;
        c.problem.sinks = true;
        c.set_cache(0, {1150 + n}, {});  // calls without a cache have few queries
        CaseRunner runner(c);
        const Outcome outcome = runner.run(decode_kernel());
        EXPECT_FALSE(outcome.refusal) << c.describe() << "\n" << *outcome.refusal;
        EXPECT_TRUE(outcome.pass()) << c.describe() << "\n" << outcome.report.describe();
    }
}

/// NaN and infinity of V in keys that only some rows of a tile see, by mma.sync (few heads) and wgmma. Rows that do not
/// see them have the bits that they have alone.
TEST_F(CudaDecode, nonfinite_values_reach_the_rows_that_see_them) {
    constexpr std::int64_t kQueries = 8, kLen = 1000;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const KernelInfo kernel = decode_kernel();
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const std::int64_t heads : {2, 16}) {
            for (const std::int64_t dim : {64, 128, 192, 256}) {
                Problem p = make_problem(1, kQueries, kLen, heads, 2, dim, dtype);
                p.mask.causal = Causal::bottom_right;
                Attention whole(p);
                whole.v.set(kInfinity, 0, kLen - 2, 0, 3);
                whole.v.set(std::numeric_limits<double>::quiet_NaN(), 0, kLen - 4, 1, dim - 2);
                whole.v.set(-kInfinity, 0, 3, 1, 5);
                ASSERT_TRUE(whole.forward(kernel)) << p.describe();
                const Report report = whole.check_forward();
                EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
                for (std::int64_t first = 0; first < kQueries - 4; ++first)
                    expect_same_rows(whole, kernel, {first, 1, kLen - kQueries + first + 1}, 2);
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::cuda_decode_test
