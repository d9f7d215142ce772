// SPDX-License-Identifier: Apache-2.0
//
// The long sums of the backward: dK and dV over a million queries, dQ over a million keys, dbias over all heads and
// queries that share it, and the sum of P by which rows of large scores are normalised. All terms of a sum are equal,
// so no sum cancels, and its roundings all go the same way.
#include <optional>

#include "cpu/units.hpp"
#include "kernels/long_sums.hpp"

namespace tessera::check::long_sums_test {
namespace {

/// `schedule`: the only one to run; nothing: all of them.
void expect_right_on_the_cpu(Attention& a, std::optional<Schedule> schedule = {}) {
    a.prepare_backward();
    const BackwardGold gold(a.problem, a.backward_args());
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (kernel.backend != Backend::cpu || (schedule && kernel.schedule != *schedule)) return;
        if (!a.backward(kernel, {.threads = 2})) return;
        const Report report = gold.compare(a.backward_args());
        EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
    });
}

TEST(LongSums, over_a_million_queries) {
    Attention a = many_queries(DType::fp32);
    expect_right_on_the_cpu(a);
}

TEST(LongSums, over_a_million_keys) {
    Attention a = many_keys(DType::fp32);
    expect_right_on_the_cpu(a);
}

/// The LSE of such a row holds none of the digits of the sum of P.
TEST(LongSums, over_the_weights_of_a_row_of_large_scores) {
    Problem p = make_problem(1, 1, 100'003, 1, 1, 8);
    p.scale = 1;
    Attention a(p);
    a.q.fill_value(0);
    a.q.set(1, 0, 0, 0, 0);
    for (std::int64_t j = 0; j < p.len_kv; ++j) a.k.set(300, 0, j, 0, 0);
    expect_right_on_the_cpu(a);
}

TEST(LongSums, over_the_heads_and_queries_that_share_a_bias) {
    Problem p = make_problem(1, 32'768, 3, 16, 16, 8);
    p.bias = p.bias_gradient = true;
    Attention a(p);
    a.bias = Tensor(DType::fp32, {1, 1, 1, 3});
    fill(a.bias.view, Fill::normal, 7);
    a.dbias = a.bias;
    for (Tensor Attention::*t : {&Attention::q, &Attention::d_o, &Attention::k, &Attention::v}) make_rows_equal(a.*t);
    a.dlse = a.lse;
    a.dlse.fill_value(1);
    expect_right_on_the_cpu(a);
}

/// The matrix units of this processor, which take fp32 too.
class LongSumsOfUnit : public testing::TestWithParam<cpu::matrix::Unit> {
 protected:
    void SetUp() override {
        if (!cpu::matrix::has_unit(GetParam())) GTEST_SKIP() << "this processor has no such unit";
        unit_.emplace(GetParam());
    }

 private:
    std::optional<cpu::matrix::OnlyUnit> unit_;
};

INSTANTIATE_TEST_SUITE_P(Units, LongSumsOfUnit, testing::Values(cpu::matrix::Unit::dot, cpu::matrix::Unit::amx),
                         cpu::matrix::unit_label);

TEST_P(LongSumsOfUnit, over_a_million_queries_and_keys) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        Attention queries = many_queries(dtype);
        expect_right_on_the_cpu(queries, Schedule::fa2);
        Attention keys = many_keys(dtype);
        expect_right_on_the_cpu(keys, Schedule::fa2);
    }
}

/// Sums over more than 2,048 rows of a matrix unit, and over more than 256 tiles of all other kernels.
void expect_same_bits_for_any_number_of_threads(DType dtype, const std::optional<Tile>& tile,
                                                std::optional<Schedule> schedule = {}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        Problem p = make_problem(1, 2'100, 2'200, 2, 1, 16, dtype);
        p.mask = {.causal = causal, .window_left = causal == Causal::none ? unbounded : 2'100};
        Attention one(p);
        one.prepare_backward();
        const BackwardGold gold(p, one.backward_args());
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.backend != Backend::cpu || (schedule && kernel.schedule != *schedule)) return;
            if (!one.backward(kernel, {.threads = 1, .tile = tile})) return;
            const Report report = gold.compare(one.backward_args());
            EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
            for (const int threads : {2, 7}) {
                Attention many = one;
                ASSERT_TRUE(many.backward(kernel, {.threads = threads, .tile = tile}));
                EXPECT_TRUE(many.dq.same_bits(one.dq)) << p.describe() << ", " << threads << " threads";
                EXPECT_TRUE(many.dk.same_bits(one.dk)) << p.describe() << ", " << threads << " threads";
                EXPECT_TRUE(many.dv.same_bits(one.dv)) << p.describe() << ", " << threads << " threads";
            }
        });
    }
}

TEST(LongSums, have_the_same_bits_for_any_number_of_threads) {
    expect_same_bits_for_any_number_of_threads(DType::fp32, Tile{8, 8});
}

TEST_P(LongSumsOfUnit, have_the_same_bits_for_any_number_of_threads) {
    for (const DType dtype : {DType::fp32, DType::bf16})
        expect_same_bits_for_any_number_of_threads(dtype, {}, Schedule::fa2);
}

}  // namespace
}  // namespace tessera::check::long_sums_test
