// SPDX-License-Identifier: Apache-2.0
//
// Queries and keys at the ends of bf16's range, on every matrix unit of this processor: their dot products are computed
// before scaling.
#include <algorithm>
#include <cmath>

#include "kernels/support.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::bf16_range_test {
namespace {

using check::Attention;

/// Calls f(kernel) for the forward that has a matrix path, with each matrix unit.
template <class F>
void for_each_unit(const F& f) {
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        SCOPED_TRACE(static_cast<int>(chosen));
        for (const KernelInfo& kernel : kernels()) {
            if (kernel.name == "cpu.fa2.forward") f(kernel);
        }
    }
}

void expect_right_lse_and_o(Attention& a, const KernelInfo& kernel) {
    a.prepare_backward();  // the reference's forward
    const Attention right = a;
    ASSERT_TRUE(a.forward(kernel));
    for (std::int64_t i = 0; i < a.problem.len_q; ++i) {
        for (std::int64_t h = 0; h < a.problem.heads_q; ++h) {
            const double lse = right.lse.get(0, h, i);
            EXPECT_LE(std::abs(a.lse.get(0, h, i) - lse), 2e-6 + 1e-6 * std::abs(lse)) << i << ", " << h;
            for (std::int64_t c = 0; c < a.problem.head_dim_v; ++c) {
                EXPECT_LE(std::abs(a.o.get(0, i, h, c) - right.o.get(0, i, h, c)), 0.03) << i << ", " << h << ", " << c;
            }
        }
    }
}

/// 64 products of 1.6e37 pass the largest float; an eighth of their sum does not.
TEST(Bf16Range, scores_that_are_finite_only_after_the_scale) {
    for_each_unit([](const KernelInfo& kernel) {
        for (const std::int64_t len_q : {4, 100}) {
            for (const double sign : {1.0, -1.0}) {
                for (const double dropout : {0.0, 0.25}) {
                    Problem p = check::make_problem(1, len_q, 1100, 1, 1, 64, DType::bf16);
                    p.dropout.probability = dropout;
                    Attention a(p);
                    a.q.fill_value(4e18);
                    a.k.fill_value(4e18 * sign);
                    expect_right_lse_and_o(a, kernel);
                }
            }
        }
    });
}

TEST(Bf16Range, rows_beside_such_a_row_keep_their_bits) {
    for_each_unit([](const KernelInfo& kernel) {
        Problem p = check::make_problem(1, 40, 70, 1, 1, 64, DType::bf16);
        Attention plain(p);
        for (std::int64_t c = 0; c < 64; ++c) plain.k.set(4e18, 0, 3, 0, c);
        for (std::int64_t i = 0; i < 40; ++i) {
            for (std::int64_t c = 0; c < 64; ++c) plain.q.set(plain.q.get(0, i, 0, c) * 1e-20, 0, i, 0, c);
        }
        Attention other = plain;
        for (std::int64_t c = 0; c < 64; ++c) other.q.set(4e18, 0, 7, 0, c);
        ASSERT_TRUE(plain.forward(kernel) && other.forward(kernel));
        EXPECT_NEAR(other.lse.get(0, 0, 7) / (8 * 4e18 * 4e18), 1, 0.02);
        for (std::int64_t i = 0; i < 40; ++i) {
            if (i == 7) continue;
            EXPECT_EQ(other.lse.get(0, 0, i), plain.lse.get(0, 0, i));
            for (std::int64_t c = 0; c < 64; ++c) EXPECT_EQ(other.o.get(0, i, 0, c), plain.o.get(0, i, 0, c));
        }
    });
}

TEST(Bf16Range, a_huge_scale_lifts_subnormal_products) {
    for_each_unit([](const KernelInfo& kernel) {
        Problem p = check::make_problem(1, 4, 6, 1, 1, 16, DType::bf16);
        p.scale = 1e38;
        Attention a(p);
        a.q.fill_value(1e-20);
        a.k.scale_by(1e-18);
        expect_right_lse_and_o(a, kernel);
    });
}

/// The limit of docs/numerics.md: a unit reads subnormal bf16 as 0. The error shows only with keys of 2^76 and more.
TEST(Bf16Range, subnormal_queries_are_0_to_a_unit) {
    for_each_unit([](const KernelInfo& kernel) {
        Problem p = check::make_problem(1, 4, 6, 1, 1, 16, DType::bf16);
        p.scale = 1;
        Attention a(p);
        a.q.fill_value(1e-39);
        a.k.fill_value(1e38);
        ASSERT_TRUE(a.forward(kernel));
        const double right = std::log(6.0) + 16 * a.q.get(0, 0, 0, 0) * a.k.get(0, 0, 0, 0);
        EXPECT_NEAR(a.lse.get(0, 0, 0), unit() == Unit::none ? right : std::log(6.0), 1e-5);
        for (const double key : {1.0, 0x1p60}) {
            a.k.fill_value(key);
            ASSERT_TRUE(a.forward(kernel));
            EXPECT_NEAR(a.lse.get(0, 0, 0), std::log(6.0), 2e-6);
        }
    });
}

}  // namespace
}  // namespace tessera::cpu::matrix::bf16_range_test
