// SPDX-License-Identifier: Apache-2.0
//
// Scores of any size that fp32 can hold: finite inputs give finite and right results in every kernel.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>

#include "kernels/support.hpp"

namespace tessera::check::huge_scores_test {
namespace {

/// Runs over every dtype and every compiled head_dim.
class SpecialValuesOfScores : public testing::TestWithParam<Storage> {};
INSTANTIATE_TEST_SUITE_P(Types, SpecialValuesOfScores, testing::ValuesIn(storages()), name_of_storage);

/// Frameworks mask with the lowest finite number: a row of nothing else is a uniform row, not NaN.
TEST_P(SpecialValuesOfScores, lowest_finite_bias) {
    const double rounding = GetParam().dtype == DType::fp32 ? 1e-5 : 0x1p-7;
    for (const double low : {-static_cast<double>(FLT_MAX), -1e30}) {
        if (low == -1e30 && GetParam().dtype != DType::fp32) continue;  // the scores are fp32 in any case
        Problem p = GetParam().problem(1, 70, 130, 1, 1);
        p.bias = p.bias_gradient = true;
        Attention a(p);
        for (std::int64_t i = 0; i < 70; ++i) {
            for (std::int64_t j = i == 13 ? 0 : 60; j < 130; ++j) a.bias.set(low, 0, 0, i, j);
        }
        expect_right(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            double mean = 0;
            for (std::int64_t j = 0; j < 130; ++j) mean += a.v.get(0, j, 0, 2) / 130;
            EXPECT_NEAR(a.o.get(0, 13, 0, 2), mean, rounding);
            EXPECT_NEAR(a.lse.get(0, 0, 13), low, std::abs(low) * 1e-6);
        });
    }
}

/// Finite inputs give finite outputs, whatever the sign and size of logits that fp32 can hold.
TEST_P(SpecialValuesOfScores, huge_finite_logits) {
    const double most = GetParam().dtype == DType::fp16 ? 6e4 : 1e38;
    for (const double size : {1e3, 6e4, 1e10, 1e30, 1e38}) {
        if (size > most) continue;
        for (const double sign : {1.0, -1.0}) {
            Problem p = GetParam().problem(1, 33, 100, 1, 1);
            p.scale = 1;
            Attention a(p);
            a.q.fill_value(0);
            a.k.fill_value(0);
            for (std::int64_t i = 0; i < 33; ++i)
                a.q.set(sign * size * (1 + 0.01 * static_cast<double>(i) * (size < most ? 1 : 0)), 0, i, 0, 1);
            for (std::int64_t j = 0; j < 100; ++j) a.k.set(1 - 0.02 * static_cast<double>(j), 0, j, 0, 1);
            a.dlse = Tensor(DType::fp32, {1, 1, 33});
            a.dlse.fill_value(1);
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel)) return;
                EXPECT_TRUE(all_finite(a.o) && all_finite(a.lse)) << sign * size;
                EXPECT_TRUE(a.check_forward().pass()) << sign * size << "\n" << a.check_forward().describe();
            });
            // The true dK, a sum of multiples of Q, passes the largest number of its dtype.
            if (size > most / 100) continue;
            a.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!a.backward(kernel)) return;
                EXPECT_TRUE(all_finite(a.dk) && all_finite(a.dv) && all_finite(a.dq)) << sign * size;
            });
        }
    }
}

/// Scores that fp32 holds in units of the natural logarithm, and not in those of log2.
TEST_P(SpecialValuesOfScores, scores_near_the_largest_float) {
    if (GetParam().dtype == DType::fp16) return;  // which has no such numbers
    const double rounding = GetParam().dtype == DType::fp32 ? 1e-5 : 0x1p-7;
    for (const double sign : {1.0, -1.0}) {
        Problem p = GetParam().problem(1, 33, 100, 1, 1);
        p.scale = 1;
        Attention a(p);
        a.q.fill_value(0);
        for (std::int64_t i = 0; i < 33; ++i) a.q.set(sign * 1e19, 0, i, 0, 1);
        for (std::int64_t j = 0; j < 100; ++j) a.k.set(3e19, 0, j, 0, 1);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.name == "cuda.fa3.forward") return;  // numerics.md: its maxima are in units of log2
            if (!a.forward(kernel)) return;
            double mean = 0;
            for (std::int64_t j = 0; j < 100; ++j) mean += a.v.get(0, j, 0, 2) / 100;
            EXPECT_NEAR(a.o.get(0, 13, 0, 2), mean, rounding) << sign;
            EXPECT_NEAR(a.lse.get(0, 0, 13), sign * 3e38, 3e36) << sign;
        });
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            EXPECT_TRUE(all_finite(a.dq) && all_finite(a.dk) && all_finite(a.dv)) << sign;
            double mean = 0;
            for (std::int64_t i = 0; i < 33; ++i) mean += a.d_o.get(0, i, 0, 2) / 100;
            EXPECT_NEAR(a.dv.get(0, 77, 0, 2), mean, rounding) << sign;
        });
    }
}

/// The maximum that is subtracted and the score are rounded alike: equal maxima give weights of exactly 1.
TEST_P(SpecialValuesOfScores, repeated_huge_maxima) {
    const bool fp16 = GetParam().dtype == DType::fp16;
    const double rounding = GetParam().dtype == DType::fp32 ? 1e-6 : fp16 ? 0x1p-11 : 0x1p-8;
    for (const double size : {0x1p11, 0x1.ffcp14, 0x1p24, 0x1.fep28, 1.1e31, 3e38}) {
        if (fp16 && size > 65504) continue;
        Problem p = GetParam().problem(1, 17, 300, 1, 1);
        p.scale = 0.7;
        Attention a(p);
        a.q.fill_value(0);
        a.k.fill_value(0);
        for (std::int64_t i = 0; i < 17; ++i) a.q.set(1, 0, i, 0, 0);
        for (std::int64_t j = 0; j < 300; ++j) a.k.set(size, 0, j, 0, 0);
        const double score = 0.7 * a.k.get(0, 0, 0, 0);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            double mean = 0;
            double size_of_terms = 0;
            for (std::int64_t j = 0; j < 300; ++j) {
                mean += a.v.get(0, j, 0, 0) / 300;
                size_of_terms += std::abs(a.v.get(0, j, 0, 0)) / 300;
            }
            for (std::int64_t i = 0; i < 17; ++i) {
                ASSERT_NEAR(a.o.get(0, i, 0, 0), mean, 3 * rounding * size_of_terms) << size;
                ASSERT_NEAR(a.lse.get(0, 0, i), score + std::log(300.0), 2e-6 + score * 0x1p-20) << size;
            }
        });
    }
}

}  // namespace
}  // namespace tessera::check::huge_scores_test
