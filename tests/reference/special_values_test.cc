// SPDX-License-Identifier: Apache-2.0
//
// The contract's table of special values, and sizes of zero, in the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "reference/features.hpp"

namespace tessera::test::special_values_test {
namespace {

constexpr Tensor Case::*kOutputs[] = {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv, &Case::dbias};

void run(Case& c) {
    c.run_forward();
    c.run_backward();
}

void expect_same_bits(const Case& a, const Case& b) {
    for (Tensor Case::*t : kOutputs) EXPECT_EQ(bits(a.*t), bits(b.*t));
}

bool all_finite(const Tensor& t) {
    for (const double x : values(t)) {
        if (!std::isfinite(x)) return false;
    }
    return true;
}

/// Causal, 5 x 7, fp32: query i sees keys 0 .. i + 2.
Problem causal_problem() {
    Problem p = small_problem();
    p.dtype = DType::fp32;
    p.mask.causal = Causal::bottom_right;
    return p;
}

/// O and LSE are NaN in the rows for which poisoned(b, h, i) holds, and not a bit differs in the others.
template <class Poisoned>
void expect_nan_rows(const Case& clean, const Case& c, const Poisoned& poisoned) {
    for_each_index(c.o, [&](const Index& i) {
        if (poisoned(i[0], i[2], i[1])) ASSERT_TRUE(std::isnan(c.o.at(i))) << "row " << i[1];
        else ASSERT_EQ(c.o.at(i), clean.o.at(i)) << "row " << i[1];
    });
    for_each_index(c.lse, [&](const Index& i) {
        if (poisoned(i[0], i[1], i[2])) ASSERT_TRUE(std::isnan(c.lse.at(i))) << "row " << i[2];
        else ASSERT_EQ(c.lse.at(i), clean.lse.at(i)) << "row " << i[2];
    });
}

TEST(SpecialValues, nan_in_a_query_stays_in_its_row) {
    Case clean(causal_problem());
    Case c = clean;
    c.q.set(kNan, 1, 2, 3, 0);
    run(clean), run(c);
    const auto its_row = [](std::int64_t b, std::int64_t h, std::int64_t i) { return b == 1 && h == 3 && i == 2; };
    expect_nan_rows(clean, c, its_row);
    for_each_index(c.dq, [&](const Index& i) { ASSERT_EQ(std::isnan(c.dq.at(i)), its_row(i[0], i[2], i[1])); });
    for (Tensor Case::*t : {&Case::dk, &Case::dv}) {
        for_each_index(c.*t, [&](const Index& i) {  // keys 0 .. 4 of kv head 1 are seen by the row
            ASSERT_EQ(std::isnan((c.*t).at(i)), i[0] == 1 && i[2] == 1 && i[1] <= 4);
        });
    }
}

TEST(SpecialValues, nan_in_a_key_reaches_the_rows_that_see_it) {
    Case clean(causal_problem());
    Case c = clean;
    c.k.set(kNan, 0, 4, 1, 2);
    run(clean), run(c);
    expect_nan_rows(clean, c,
                    [](std::int64_t b, std::int64_t h, std::int64_t i) { return b == 0 && h >= 2 && i >= 2; });
    for_each_index(c.dq,
                   [&](const Index& i) { ASSERT_EQ(std::isnan(c.dq.at(i)), i[0] == 0 && i[2] >= 2 && i[1] >= 2); });
}

TEST(SpecialValues, nan_in_a_value_reaches_the_rows_that_see_it) {
    Case clean(causal_problem());
    Case c = clean;
    c.v.set(kNan, 0, 4, 1, 1);
    run(clean), run(c);
    EXPECT_EQ(bits(c.lse), bits(clean.lse));
    for_each_index(c.o, [&](const Index& i) {
        const bool sees = i[0] == 0 && i[2] >= 2 && i[1] >= 2;
        if (sees && i[3] == 1) ASSERT_TRUE(std::isnan(c.o.at(i)));
        else ASSERT_EQ(c.o.at(i), clean.o.at(i));
    });
    EXPECT_EQ(bits(c.dv), bits(clean.dv));  // dV does not depend on V
    for_each_index(c.dq,
                   [&](const Index& i) { ASSERT_EQ(std::isnan(c.dq.at(i)), i[0] == 0 && i[2] >= 2 && i[1] >= 2); });
}

TEST(BugFamilies, nan_and_inf_behind_the_mask_change_no_bit_bug_8) {
    Problem p = causal_problem();
    p.mask.window_left = 3;  // 5 queries, 10 keys: query i sees i + 2 .. i + 5; keys 0, 1 are seen by none
    p.len_kv = 10;
    p.alibi = p.bias = p.bias_gradient = true;
    for (const double poison : {kNan, kInfinity, -kInfinity}) {
        Case clean(p);
        Case c = clean;
        for (const std::int64_t j : {0, 1}) {
            c.k.set(poison, 1, j, 0, 1);
            c.v.set(poison, 1, j, 0, 0);
        }
        for_each_index(c.bias, [&](const Index& i) {
            const std::int64_t from_diagonal = i[3] - (i[2] + 5);
            if (from_diagonal > 0 || from_diagonal < -3) c.bias.set(poison, i);
        });
        run(clean), run(c);
        expect_same_bits(clean, c);
        EXPECT_TRUE(all_finite(c.o) && all_finite(c.lse) && all_finite(c.dq) && all_finite(c.dbias));
        for (const std::int64_t j : {0, 1}) {
            EXPECT_EQ(c.dk.at(1, j, 0, 1), 0);
            EXPECT_EQ(c.dv.at(1, j, 0, 0), 0);
        }
    }
}

TEST(SpecialValues, ragged_neighbours_do_not_meet) {
    Feature f = ragged_features().back();
    Case clean(f.problem, f.options);
    Case c = clean;
    for (std::int64_t x = 0; x < f.problem.head_dim; ++x) c.k.set(kNan, c.in_kv(4, 0, 0, x));
    c.q.set(kInfinity, c.in_q(2, 0, 0, 0));  // sequence 2 has a query and no key: nothing depends on it
    run(clean), run(c);
    for (std::int64_t b : {0, 1, 2, 3}) {
        for (std::int64_t h = 0; h < f.problem.heads_q; ++h) {
            for (std::int64_t i = 0; i < c.len_q_of(b); ++i) {
                EXPECT_EQ(c.o.at(c.in_q(b, i, h, 0)), clean.o.at(c.in_q(b, i, h, 0)));
                EXPECT_EQ(c.lse.at(c.in_lse(b, h, i)), clean.lse.at(c.in_lse(b, h, i)));
                EXPECT_EQ(c.dq.at(c.in_q(b, i, h, 0)), clean.dq.at(c.in_q(b, i, h, 0)));
            }
        }
    }
    EXPECT_EQ(c.lse.at(c.in_lse(2, 0, 0)), c.sinks.at(0));
    EXPECT_TRUE(std::isnan(c.lse.at(c.in_lse(4, 0, 3))));
}

TEST(SpecialValues, a_score_of_plus_infinity_makes_a_nan_row) {
    for (const bool by_bias : {false, true}) {
        Problem p = causal_problem();
        p.bias = by_bias;
        Case clean(p);
        Case c = clean;
        if (by_bias) {
            c.bias.set(kInfinity, 0, 1, 3, 0);
        } else {
            for (Case* x : {&clean, &c}) x->q.set(1, 0, 3, 1, 0);
            for (std::int64_t j = 0; j < 7; ++j) c.k.set(j == 4 ? kInfinity : c.k.at(0, j, 0, 0), 0, j, 0, 0);
        }
        run(clean), run(c);
        EXPECT_TRUE(std::isnan(c.o.at(0, 3, 1, 0)) && std::isnan(c.lse.at(0, 1, 3)) && std::isnan(c.dq.at(0, 3, 1, 0)));
        EXPECT_EQ(c.o.at(0, 1, 1, 0), clean.o.at(0, 1, 1, 0));
        EXPECT_EQ(c.o.at(1, 3, 1, 0), clean.o.at(1, 3, 1, 0));
    }
}

TEST(BugFamilies, rows_without_a_visible_key_bug_10) {
    Problem p = causal_problem();
    p.len_kv = 3;  // queries 0 and 1 see nothing
    p.bias = p.bias_gradient = true;
    p.dropout.probability = 0.2;
    Case c(p);
    fill(c.dlse, kInfinity);
    for_each_index(c.dlse, [&](const Index& i) {
        if (i[2] >= 2) c.dlse.set(1, i);
    });
    run(c);
    for_each_index(c.o, [&](const Index& i) {
        if (i[1] >= 2) return;
        ASSERT_EQ(std::bit_cast<std::uint64_t>(c.o.at(i)), 0u);  // +0, not -0
    });
    for_each_index(c.lse, [&](const Index& i) { ASSERT_EQ(c.lse.at(i) == -kInfinity, i[2] < 2); });
    for_each_index(c.dq, [&](const Index& i) { ASSERT_TRUE(i[1] < 2 ? c.dq.at(i) == 0 : std::isfinite(c.dq.at(i))); });
    for_each_index(c.dbias,
                   [&](const Index& i) { ASSERT_TRUE(i[2] < 2 ? c.dbias.at(i) == 0 : std::isfinite(c.dbias.at(i))); });
    EXPECT_TRUE(all_finite(c.dk) && all_finite(c.dv));
}

TEST(BugFamilies, bias_of_minus_infinity_or_nearly_bug_11) {
    Problem p = causal_problem();
    p.mask = {};
    p.bias = p.bias_gradient = true;
    Case c(p);
    fill(c.bias, -kInfinity);
    run(c);
    for (const double x : values(c.o)) EXPECT_EQ(x, 0);
    for (const double x : values(c.lse)) EXPECT_EQ(x, -kInfinity);
    for (Tensor Case::*t : {&Case::dq, &Case::dk, &Case::dv, &Case::dbias}) {
        for (const double x : values(c.*t)) ASSERT_EQ(x, 0);
    }
    Case masked(p), causal(causal_problem());
    for_each_index(masked.bias, [&](const Index& i) { masked.bias.set(i[3] > i[2] + 2 ? -kInfinity : 0.0, i); });
    causal.q = masked.q, causal.k = masked.k, causal.v = masked.v, causal.d_o = masked.d_o, causal.dlse = masked.dlse;
    run(masked), run(causal);
    for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv})
        EXPECT_EQ(values(masked.*t), values(causal.*t));
    for (const double low : {-1e30, static_cast<double>(std::numeric_limits<float>::lowest())}) {
        fill(c.bias, low);
        run(c);
        EXPECT_TRUE(all_finite(c.o) && all_finite(c.lse) && all_finite(c.dq) && all_finite(c.dk) && all_finite(c.dv))
            << low;
    }
}

/// The gradient of the LSE of such a row, which is log(0), is often NaN.
TEST(SpecialValues, lse_gradients_of_rows_of_minus_infinity_are_left_out) {
    Problem p = causal_problem();
    p.bias = p.bias_gradient = true;
    Case c(p);
    for_each_index(c.bias, [&](const Index& i) {
        if (i[2] == 2) c.bias.set(-kInfinity, i);
    });
    Case clean = c;
    for_each_index(c.dlse, [&](const Index& i) {
        if (i[2] == 2) c.dlse.set(i[1] % 2 ? kNan : kInfinity, i);
    });
    run(clean), run(c);
    EXPECT_TRUE(all_finite(c.dk));
    expect_same_bits(clean, c);
}

TEST(SpecialValues, finite_inputs_give_finite_results) {
    for (const double size : {1e-30, 1.0, 30.0, 1e4, 1e15, 1e18}) {  // scores up to 1e36, finite in fp32
        Case c(causal_problem(), {.deviation = size});
        std::mt19937_64 random(5);
        fill_normal(c.v, random);
        fill_normal(c.d_o, random);
        fill(c.dlse, 1);
        run(c);
        for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv})
            EXPECT_TRUE(all_finite(c.*t)) << size;
    }
}

TEST(BugFamilies, sizes_of_zero_bug_22) {
    for (std::int64_t Problem::*field : {&Problem::batch, &Problem::len_q, &Problem::len_kv, &Problem::heads_q}) {
        for (const bool everything : {false, true}) {
            Problem p = small_problem();
            if (everything) use_everything(p);
            p.*field = 0;
            Case c(p);
            run(c);
            for (Tensor Case::*t : {&Case::o, &Case::dq, &Case::dk, &Case::dv}) {
                for (const double x : values(c.*t)) EXPECT_EQ(x, 0);
            }
            for_each_index(c.lse,
                           [&](const Index& i) { EXPECT_EQ(c.lse.at(i), everything ? c.sinks.at(i[1]) : -kInfinity); });
        }
    }
    Problem none = small_problem();
    none.heads_q = none.heads_kv = 0;
    Case c(none);
    run(c);
    EXPECT_TRUE(values(c.o).empty());
}

TEST(BugFamilies, zero_length_sequences_at_any_place_bug_17) {
    const std::vector<std::int64_t> lens[] = {{0, 2, 3}, {2, 0, 3}, {2, 3, 0}, {0, 0, 4}, {0, 0, 0}};
    for (const auto& lens_q : lens) {
        for (const auto& lens_kv : lens) {
            Problem p = small_problem();
            CaseOptions options;
            set_ragged(p, options, lens_q, lens_kv);
            Case c(p, options);
            run(c);
            for (std::int64_t b = 0; b < 3; ++b) {
                for (std::int64_t i = 0; i < c.len_q_of(b); ++i) {
                    const bool empty = c.len_kv_of(b) == 0;
                    EXPECT_EQ(c.lse.at(c.in_lse(b, 1, i)) == -kInfinity, empty);
                    EXPECT_EQ(c.o.at(c.in_q(b, i, 1, 0)) == 0, empty);
                }
                for (std::int64_t j = 0; j < c.len_kv_of(b); ++j) {
                    EXPECT_EQ(c.dv.at(c.in_kv(b, j, 0, 0)) == 0, c.len_q_of(b) == 0);
                }
            }
            for (Tensor Case::*t : {&Case::o, &Case::dq, &Case::dk, &Case::dv}) EXPECT_TRUE(all_finite(c.*t));
        }
    }
}

}  // namespace
}  // namespace tessera::test::special_values_test
