// SPDX-License-Identifier: Apache-2.0
//
// Compares the reference's forward with a second implementation in long double with explicit matrices, and with cases
// whose result is known in closed form.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

#include "core/dropout.hpp"
#include "reference/features.hpp"

namespace tessera::test::forward_test {
namespace {

using Real = long double;
using Matrix = std::vector<std::vector<Real>>;

/// One head of one sequence. Nothing is shared with the reference but the Philox function, which has tests of its own.
struct PlainHead {
    Matrix p;               // [len_q, len_kv], after the softmax and before dropout
    std::vector<Real> lse;  // [len_q]
    Matrix o;               // [len_q, head_dim_v]
};

bool sees(const Problem& p, std::int64_t len_q, std::int64_t len_kv, std::int64_t i, std::int64_t j) {
    const std::int64_t from_diagonal = j - (i + len_kv - len_q);
    if (p.mask.causal == Causal::top_left && j > i) return false;
    if (p.mask.causal == Causal::bottom_right && from_diagonal > 0) return false;
    if (p.mask.window_left != unbounded && from_diagonal < -p.mask.window_left) return false;
    return p.mask.window_right == unbounded || from_diagonal <= p.mask.window_right;
}

Real score(const Case& c, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    const Problem& p = c.problem;
    const std::int64_t kv_head = h * p.heads_kv / p.heads_q;
    Real s = 0;
    for (std::int64_t x = 0; x < p.head_dim; ++x)
        s += Real(c.q.at(c.in_q(b, i, h, x))) * c.k.at(c.in_kv(b, j, kv_head, x));
    s *= p.scale ? Real(*p.scale) : 1 / std::sqrt(Real(p.head_dim));
    if (p.softcap > 0) s = p.softcap * std::tanh(s / p.softcap);
    if (p.alibi) {
        const Real slope = c.options.slopes_per_batch ? c.alibi_slopes.at(b, h) : c.alibi_slopes.at(h);
        s -= slope * std::fabs(Real(i + c.len_kv_of(b) - c.len_q_of(b) - j));
    }
    if (p.bias) s += c.bias.at(c.in_bias(b, h, i, j));
    return s;
}

/// The word of docs/numerics.md, bit by bit.
std::uint32_t random_word(const Problem& p, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    std::uint32_t word = 0;
    for (int bit = 0; bit < 32; ++bit) {
        const PhiloxBlock words = philox4x32(
            {static_cast<std::uint32_t>(i / 2), static_cast<std::uint32_t>(j / 16 + bit / 4 * (std::int64_t{1} << 28)),
             static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(b)},
            p.dropout.seed);
        const std::int64_t place = (i % 2) * 16 + (j % 2) * 8 + (j % 16) / 2;
        word |= (words[static_cast<std::size_t>(bit % 4)] >> place & 1) << (31 - bit);
    }
    return word;
}

PlainHead plain_head(const Case& c, std::int64_t b, std::int64_t h) {
    const Problem& p = c.problem;
    const std::int64_t len_q = c.len_q_of(b), len_kv = c.len_kv_of(b);
    PlainHead head{Matrix(len_q, std::vector<Real>(len_kv)), std::vector<Real>(len_q),
                   Matrix(len_q, std::vector<Real>(p.head_dim_v))};
    for (std::int64_t i = 0; i < len_q; ++i) {
        // log(exp(a) + exp(b)), key by key, instead of a maximum and a sum.
        std::optional<Real> lse;
        if (p.sinks) lse = c.sinks.at(h);
        for (std::int64_t j = 0; j < len_kv; ++j) {
            if (!sees(p, len_q, len_kv, i, j)) continue;
            const Real s = score(c, b, h, i, j);
            lse = lse ? std::max(*lse, s) + std::log1p(std::exp(-std::fabs(*lse - s))) : s;
        }
        head.lse[i] = lse.value_or(-kInfinity);
        for (std::int64_t j = 0; j < len_kv; ++j) {
            if (!sees(p, len_q, len_kv, i, j)) continue;
            head.p[i][j] = std::exp(score(c, b, h, i, j) - *lse);
            if (random_word(p, b, h, i, j) >= std::round((1 - p.dropout.probability) * 0x1p32)) continue;
            for (std::int64_t x = 0; x < p.head_dim_v; ++x) {
                const Real value = c.v.at(c.in_kv(b, j, h * p.heads_kv / p.heads_q, x));
                head.o[i][x] += head.p[i][j] * value / (1 - Real(p.dropout.probability));
            }
        }
    }
    return head;
}

class Forward : public ::testing::TestWithParam<Feature> {};

TEST_P(Forward, matches_the_plain_implementation) {
    Case c(GetParam().problem, GetParam().options);
    c.run_forward();
    const Problem& p = c.problem;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
            const PlainHead expected = plain_head(c, b, h);
            for (std::int64_t i = 0; i < c.len_q_of(b); ++i) {
                const double lse = c.lse.at(c.in_lse(b, h, i));
                if (std::isinf(expected.lse[i])) ASSERT_EQ(lse, -kInfinity);
                else ASSERT_NEAR(lse, static_cast<double>(expected.lse[i]), 1e-14) << b << "," << h << "," << i;
                for (std::int64_t x = 0; x < p.head_dim_v; ++x) {
                    ASSERT_NEAR(c.o.at(c.in_q(b, i, h, x)), static_cast<double>(expected.o[i][x]), 1e-14)
                        << "batch " << b << " head " << h << " query " << i << " column " << x;
                }
            }
        }
    }
}

TEST_P(Forward, lse_is_optional) {
    Case c(GetParam().problem, GetParam().options);
    Case without = c;
    without.lse = Tensor();
    c.run_forward(), without.run_forward();
    EXPECT_EQ(bits(c.o), bits(without.o));
}

TEST_P(Forward, other_dtypes_are_the_rounded_fp64_result) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        Problem p = GetParam().problem;
        p.dtype = dtype;
        Case narrow(p, GetParam().options);
        Case wide(GetParam().problem, GetParam().options);
        for (Tensor Case::*t : {&Case::q, &Case::k, &Case::v, &Case::bias}) {
            if (!(wide.*t).view().given()) continue;
            for_each_index(wide.*t, [&](const Index& i) { (wide.*t).set((narrow.*t).at(i), i); });
        }
        narrow.run_forward(), wide.run_forward();
        Tensor expected_o = narrow.o, expected_lse = narrow.lse;
        for_each_index(wide.o, [&](const Index& i) { expected_o.set(wide.o.at(i), i); });
        for_each_index(wide.lse, [&](const Index& i) { expected_lse.set(wide.lse.at(i), i); });
        EXPECT_EQ(bits(narrow.o), bits(expected_o)) << name_of(dtype);
        EXPECT_EQ(bits(narrow.lse), bits(expected_lse)) << name_of(dtype);
    }
}

INSTANTIATE_TEST_SUITE_P(Reference, Forward, ::testing::ValuesIn(features()), feature_name);

/// One batch, one head, head_dim 1.
Case line(
    std::int64_t len_q, std::int64_t len_kv, const std::function<void(Problem&)>& change = [](Problem&) {}) {
    Problem p = Problem::dense(1, len_q, 1, 1, DType::fp64);
    p.len_kv = len_kv;
    change(p);
    return Case(p);
}

TEST(ClosedForm, a_zero_query_takes_the_mean_of_the_values_it_sees) {
    Case c = line(4, 6, [](Problem& p) { p.mask.causal = Causal::bottom_right; });
    fill(c.q, 0);
    c.run_forward();
    double sum = 0;
    for (std::int64_t j = 0; j < 6; ++j) {
        sum += c.v.at(0, j, 0, 0);
        if (j < 2) continue;
        EXPECT_NEAR(c.o.at(0, j - 2, 0, 0), sum / static_cast<double>(j + 1), 1e-15);
        EXPECT_NEAR(c.lse.at(0, 0, j - 2), std::log(static_cast<double>(j + 1)), 1e-15);
    }
}

TEST(ClosedForm, one_key_gives_its_value_and_its_score) {
    Case c = line(3, 1, [](Problem& p) { p.scale = 0.25; });
    c.run_forward();
    for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(c.o.at(0, i, 0, 0), c.v.at(0, 0, 0, 0));
        EXPECT_EQ(c.lse.at(0, 0, i), 0.25 * c.q.at(0, i, 0, 0) * c.k.at(0, 0, 0, 0));
    }
    c.run_backward();  // P is 1 whatever the score: only the LSE moves
    for (std::int64_t i = 0; i < 3; ++i)
        EXPECT_NEAR(c.dq.at(0, i, 0, 0), 0.25 * c.dlse.at(0, 0, i) * c.k.at(0, 0, 0, 0), 1e-15);
}

TEST(ClosedForm, equal_values_come_out_as_they_are) {
    Case c(features().front().problem);
    fill(c.v, 3);
    c.run_forward();
    for (const double o : values(c.o)) EXPECT_NEAR(o, 3, 1e-14);
}

TEST(BugFamilies, softcap_has_its_closed_form_bug_50) {
    Case c = line(1, 1, [](Problem& p) { p.softcap = 5, p.scale = 1; });
    for (const double x : {-1e300, -30.0, -2.0, 0.0, 1e-6, 0.5, 4.0, 100.0, 1e300}) {
        c.q.set(x, 0);
        c.k.set(1, 0);
        c.run_forward();
        EXPECT_NEAR(c.lse.at(0, 0, 0), 5 * std::tanh(x / 5), 1e-15) << x;
        fill(c.dlse, 1);
        c.run_backward();
        const double t = std::tanh(x / 5);
        EXPECT_NEAR(c.dq.at(0, 0, 0, 0), 1 - t * t, 1e-15) << x;
    }
}

TEST(ClosedForm, alibi_is_a_geometric_series) {
    Case c = line(3, 5, [](Problem& p) { p.alibi = true; });
    fill(c.q, 0);
    fill(c.alibi_slopes, 0.5);
    c.run_forward();
    for (std::int64_t i = 0; i < 3; ++i) {
        double sum = 0, weighted = 0;
        for (std::int64_t j = 0; j < 5; ++j) {
            const double weight = std::exp(-0.5 * std::fabs(static_cast<double>(i + 2 - j)));
            sum += weight, weighted += weight * c.v.at(0, j, 0, 0);
        }
        EXPECT_NEAR(c.lse.at(0, 0, i), std::log(sum), 1e-15);
        EXPECT_NEAR(c.o.at(0, i, 0, 0), weighted / sum, 1e-15);
    }
}

TEST(ClosedForm, dropout_counts_the_kept_keys) {
    constexpr std::int64_t kKeys = 64;
    Case c = line(8, kKeys, [](Problem& p) { p.dropout = {0.25, 4}; });
    fill(c.q, 0);
    fill(c.v, 1);
    c.run_forward();
    for (std::int64_t i = 0; i < 8; ++i) {
        std::int64_t kept = 0;
        for (std::int64_t j = 0; j < kKeys; ++j) kept += dropout_word(4, 0, 0, i, j) < 3221225472u;  // 0.75 * 2^32
        EXPECT_NEAR(c.o.at(0, i, 0, 0), static_cast<double>(kept) / (0.75 * kKeys), 1e-14);
        EXPECT_NEAR(c.lse.at(0, 0, i), std::log(static_cast<double>(kKeys)), 1e-14);  // before dropout
    }
}

// The threshold is a weight's word, which is dropped, or one more: all of its bits count.
TEST(ClosedForm, dropout_compares_whole_words) {
    constexpr std::int64_t kKeys = 40;
    for (const std::int64_t key : {0, 15, 16, 39}) {
        for (const std::int64_t query : {0, 3}) {
            const std::uint32_t word = dropout_word(4, 0, 0, query, key);
            for (const bool is_kept : {false, true}) {
                const double keep = (word + (is_kept ? 1.0 : 0.0)) * 0x1p-32;
                Case c = line(4, kKeys, [&](Problem& p) { p.dropout = {1 - keep, 4}; });
                fill(c.q, 0);
                fill(c.v, 0);
                c.v.set(1, 0, key);
                c.run_forward();
                EXPECT_NEAR(c.o.at(0, query, 0, 0), is_kept ? 1 / (keep * kKeys) : 0, 1e-14) << query << " " << key;
            }
        }
    }
}

TEST(ClosedForm, a_constant_bias_moves_the_lse_only) {
    const Feature f = bias_features().front();
    Case c(f.problem);
    Case moved = c;
    fill(c.bias, 0), fill(moved.bias, 1024);
    c.run_forward(), moved.run_forward();
    for_each_index(c.lse, [&](const Index& i) { ASSERT_NEAR(moved.lse.at(i), c.lse.at(i) + 1024, 1e-12); });
    for_each_index(c.o, [&](const Index& i) { ASSERT_NEAR(moved.o.at(i), c.o.at(i), 1e-12); });
}

TEST(ClosedForm, equal_masks_give_equal_bits) {
    for (const std::int64_t len_kv : {3, 5, 8}) {
        Problem p = small_problem();
        p.len_kv = len_kv;
        p.mask.causal = Causal::bottom_right;
        Case causal(p);
        causal.run_forward(), causal.run_backward();
        for (const std::int64_t left : {unbounded, len_kv}) {
            p.mask = {.window_left = left, .window_right = 0};
            Case window(p);
            window.run_forward(), window.run_backward();
            for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv}) {
                EXPECT_EQ(bits(causal.*t), bits(window.*t));
            }
        }
    }
}

}  // namespace
}  // namespace tessera::test::forward_test
