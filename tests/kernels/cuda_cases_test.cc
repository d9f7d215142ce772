// SPDX-License-Identifier: Apache-2.0
//
// The cases of all_kernels_test, changed so that the 16-bit CUDA kernels take them: many are fp32 or have odd
// addresses, which those refuse. So every mask, length and batch shape runs on them. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "check/limits.hpp"
#include "check/run_case.hpp"
#include "long_run.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_cases_test {
namespace {

constexpr std::uint64_t kSeed = 20261121;
const std::uint64_t kRandomCases = long_run() ? 8000 : 800;
constexpr std::uint64_t kGroup = 50;

std::int64_t rounded_up(std::int64_t dim) { return (dim + 7) / 8 * 8; }

/// The case with its masks and lengths in 16 bits, packed, with aligned rows. Every second case keeps its score
/// modifications but the bias, with a head_dim for which fa3 takes them; the others have plain scores.
Case bent(Case c, DType dtype, bool plain) {
    Problem& p = c.problem;
    p.dtype = dtype;
    p.head_dim = rounded_up(p.head_dim);
    p.head_dim_v = rounded_up(p.head_dim_v);
    p.bias = p.bias_gradient = false;
    if (plain) {
        if (p.kv_lengths && p.ragged) p.ragged = false, p.total_q = 0;  // its keys have no offsets
        p.kv_lengths = p.left_padding = p.cache_batch_index = false;
        p.page_size = 0;
        p.softcap = 0;
        p.alibi = false;
        p.dropout = {};
        if (p.scale && *p.scale <= 0) p.scale.reset();
    } else {
        p.head_dim = std::min<std::int64_t>(p.head_dim, 128);
        p.head_dim_v = std::min<std::int64_t>(p.head_dim_v, 128);
    }
    if (c.layout == Layout::random) c.layout = Layout::bshd;
    c.tile.reset();
    return c;
}

/// Every CUDA kernel takes the plain cases, except fa3's backward, which leaves some to fa2's, and the decode kernel.
bool has_to_take(const KernelInfo& kernel) {
    return !splits_keys(kernel) && (kernel.pass == Pass::forward || kernel.schedule != Schedule::fa3);
}

int kernels_that_have_to() {
    const auto all = kernels();
    return static_cast<int>(std::count_if(all.begin(), all.end(), [](const KernelInfo& kernel) {
        return kernel.backend == Backend::cuda && has_to_take(kernel);
    }));
}

/// Runs the case on every CUDA kernel, both passes. Returns how many kernels of has_to_take() took it.
int expect_right(const Case& which) {
    SCOPED_TRACE(which.describe());
    CaseRunner runner(which);
    int ran = 0;
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend != Backend::cuda) continue;
        const Outcome outcome = runner.run(kernel);
        EXPECT_TRUE(outcome.pass()) << kernel.name << "\n" << outcome.report.describe();
        if (outcome.refusal && expected_refusal(kernel, runner.problem()).empty() && has_to_take(kernel))
            ADD_FAILURE() << kernel.name << " refused: " << *outcome.refusal;
        if (!outcome.refusal && has_to_take(kernel)) ++ran;
    }
    return ran;
}

class CudaCases : public testing::TestWithParam<DType> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaCases, corners) {
    int ran = 0;
    for (const Case& c : corner_cases()) {
        Case with_residual = bent(c, GetParam(), true);
        with_residual.o_residual = true;
        ran += expect_right(bent(c, GetParam(), true)) + expect_right(with_residual);
    }
    EXPECT_GT(ran, 0);
}

/// Lengths around every block edge under a causal mask, so that a tile is partial in every possible way.
TEST_P(CudaCases, lengths_around_the_block_edges) {
    for (const std::int64_t dim : {64, 128, 256}) {
        for (const std::int64_t q : {1, 63, 64, 65, 127, 129, 191, 193, 385}) {
            for (const std::int64_t kv : {1, 79, 80, 81, 127, 128, 129, 257}) {
                Case c;
                c.id = std::to_string(dim) + "x" + std::to_string(q) + "x" + std::to_string(kv);
                c.problem = Problem::dense(1, q, 2, dim, GetParam());
                c.problem.len_kv = kv;
                c.problem.mask.causal = q % 2 == 0 ? Causal::top_left : Causal::bottom_right;
                expect_right(c);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, CudaCases, testing::Values(DType::bf16, DType::fp16),
                         [](const auto& which) { return std::string(name_of(which.param)); });

/// The random cases, in groups that the parts of a test program share out.
class CudaRandomCases : public testing::TestWithParam<std::tuple<DType, std::uint64_t>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaRandomCases, every_kernel_is_right) {
    const auto [dtype, first] = GetParam();
    for (std::uint64_t i = first; i < first + kGroup; ++i) {
        const bool plain = i % 2 == 0;
        const int ran = expect_right(bent(random_case(random_seed(kSeed), i), dtype, plain));
        EXPECT_TRUE(!plain || ran == kernels_that_have_to()) << "case " << i << ", " << ran << " kernels";
    }
}

std::string name_of_group(const testing::TestParamInfo<std::tuple<DType, std::uint64_t>>& which) {
    return std::string(name_of(std::get<0>(which.param))) + "_" + std::to_string(std::get<1>(which.param));
}

INSTANTIATE_TEST_SUITE_P(AllKernels, CudaRandomCases,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16),
                                          testing::Range<std::uint64_t>(0, kRandomCases, kGroup)),
                         name_of_group);

}  // namespace
}  // namespace tessera::check::cuda_cases_test
