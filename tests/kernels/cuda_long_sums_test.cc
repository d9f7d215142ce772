// SPDX-License-Identifier: Apache-2.0
//
// Long sums of the CUDA kernels: dK and dV over up to a million queries, O and dQ over 32,768 to 131,072 keys, dbias
// over all heads and queries that share it. Tensor cores truncate each addition to an fp32 accumulator, so one
// accumulator of a million equal terms would end 0.6 % too small (cuda/host/query_parts.hpp). Keys are four and alike
// where queries are many: P is 1/4 and dS is 1/4 of dLSE, which 16 bits hold, so no other error hides that of the sums.
// Skipped without a GPU.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "kernels/long_sums.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_long_sums_test {
namespace {

/// A data type, a head_dim, and whether scores have a softcap (the general shapes of fa3).
class CudaLongSums : public testing::TestWithParam<std::tuple<DType, std::int64_t, bool>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
    /// Four keys that are alike. With a softcap the scores are 0, where its slope is 1.
    static Attention of_four_keys(std::int64_t queries, std::int64_t heads) {
        const auto [dtype, head_dim, softcap] = GetParam();
        Problem p = make_problem(1, queries, 4, heads, heads, head_dim, dtype);
        if (softcap) p.softcap = 20;
        Attention a(p);
        for (Tensor Attention::*t : {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o})
            make_rows_equal(a.*t);
        if (softcap) a.k.fill_value(0);
        a.dlse = a.lse;
        a.dlse.fill_value(1);
        return a;
    }
    static Attention of_many_keys(std::int64_t keys) {
        const auto [dtype, head_dim, softcap] = GetParam();
        Attention a = many_keys(dtype, head_dim, keys);
        if (softcap) a.problem.softcap = 20;
        return a;
    }
    static void expect_right_gradients(Attention& a) {
        a.prepare_backward();
        const BackwardGold gold(a.problem, a.backward_args());
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.backend != Backend::cuda || !a.backward(kernel)) return;
            const Report report = gold.compare(a.backward_args());
            EXPECT_TRUE(report.pass()) << kernel.name << ", " << a.problem.describe() << "\n" << report.describe();
        });
    }
};

std::string label(const testing::TestParamInfo<CudaLongSums::ParamType>& which) {
    const auto [dtype, head_dim, softcap] = which.param;
    return std::string(name_of(dtype)) + "_" + std::to_string(head_dim) + (softcap ? "_softcap" : "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaLongSums,
                         testing::Values(std::tuple{DType::bf16, 64, false}, std::tuple{DType::fp16, 64, false},
                                         std::tuple{DType::bf16, 128, false}, std::tuple{DType::fp16, 128, false},
                                         std::tuple{DType::bf16, 256, false}, std::tuple{DType::fp16, 256, false},
                                         std::tuple{DType::bf16, 64, true}, std::tuple{DType::fp16, 128, true},
                                         std::tuple{DType::fp32, 64, false}, std::tuple{DType::fp32, 128, false}),
                         label);

TEST_P(CudaLongSums, gradients_over_many_queries) {
    // Over a million queries the reference takes a minute; bf16 would hide the error of a shorter sum.
    const bool longest = std::get<0>(GetParam()) == DType::bf16 && std::get<1>(GetParam()) == 64;
    Attention a = of_four_keys(longest ? kMillion : 200'003, 1);
    expect_right_gradients(a);
}

TEST_P(CudaLongSums, gradients_over_many_keys) {
    Attention a = of_many_keys(std::get<0>(GetParam()) == DType::fp16 ? 32'768 : 65'536);
    expect_right_gradients(a);
}

TEST_P(CudaLongSums, output_over_many_keys) {
    if (std::get<0>(GetParam()) == DType::fp32) GTEST_SKIP() << "LongRows has O of fp32";
    Attention a = of_many_keys(std::get<0>(GetParam()) == DType::fp16 ? 32'768 : 131'072);
    const ForwardGold gold(a.problem, a.forward_args());
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.backend != Backend::cuda || !a.forward(kernel)) return;
        const Report report = gold.compare(a.forward_args());
        EXPECT_TRUE(report.pass()) << kernel.name << ", " << a.problem.describe() << "\n" << report.describe();
    });
}

/// Causal, with grouped heads, and in a batch of sequences of which one is long: parts of the queries see other keys.
TEST_P(CudaLongSums, parts_of_the_queries_of_any_mask_and_sequence) {
    const auto [dtype, head_dim, softcap] = GetParam();
    if (head_dim == 256) GTEST_SKIP() << "the reference would take minutes";
    for (const bool ragged : {false, true}) {
        const std::vector<std::int64_t> len_q{40, 20'000}, len_kv{70, 300};
        Problem p = ragged ? make_ragged(len_q, len_kv, 8, 1, head_dim, dtype)
                           : make_problem(1, 20'000, 200, 8, 1, head_dim, dtype);
        p.mask.causal = ragged ? Causal::bottom_right : Causal::top_left;
        if (softcap) p.softcap = 20;
        Attention a = ragged ? Attention(p, 3, len_q, len_kv) : Attention(p, 3);
        expect_right_gradients(a);
    }
}

/// A sum over heads and queries.
TEST_P(CudaLongSums, bias_gradient_over_heads_and_queries) {
    if (std::get<1>(GetParam()) == 256) GTEST_SKIP() << "the reference would take minutes";
    Attention a = of_four_keys(65'536, 16);
    a.problem.bias = a.problem.bias_gradient = true;
    a.bias = Tensor(DType::fp32, {1, 1, 1, 4});
    a.bias.fill_value(0);
    a.dbias = a.bias;
    expect_right_gradients(a);
}

}  // namespace
}  // namespace tessera::check::cuda_long_sums_test
