// SPDX-License-Identifier: Apache-2.0
//
// Compares the reference's gradients with finite differences of L = <dO, O> + <dLSE, LSE> in fp64, and with the
// identities that gradients of attention obey.
#include <gtest/gtest.h>

#include <cmath>

#include "reference/features.hpp"

namespace tessera::test::gradient_test {
namespace {

/// Evaluates L; rows that see no key have LSE -inf, whatever the inputs, and do not count.
class Loss {
 public:
    explicit Loss(Case& c)
        : case_(c), plan_(plan(c.problem, {.kernel = "reference.forward", .threads = 1})), workspace_(plan_) {}

    double operator()() {
        forward(plan_, case_.forward_args(), workspace_);
        double sum = 0;
        for_each_index(case_.o, [&](const Index& i) { sum += case_.d_o.at(i) * case_.o.at(i); });
        for_each_index(case_.lse, [&](const Index& i) {
            const double lse = case_.lse.at(i);
            if (lse != -kInfinity) sum += case_.dlse.at(i) * lse;
        });
        return sum;
    }

    /// d L / d tensor[i] by the five-point rule: truncation h^4 and rounding 1e-16 / h meet near h = 1e-3. A power of
    /// two is added to sinks, which are fp32, without rounding.
    double slope(Tensor& tensor, const Index& i) {
        constexpr double kStep = 0x1p-10;
        const double x = tensor.at(i);
        const auto at = [&](double steps) {
            tensor.set(x + steps * kStep, i);
            return (*this)();
        };
        const double result = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
        tensor.set(x, i);
        return result;
    }

 private:
    Case& case_;
    Plan plan_;
    Workspace workspace_;
};

class Gradient : public ::testing::TestWithParam<Feature> {};

TEST_P(Gradient, is_the_slope_of_the_forward) {
    Case c(GetParam().problem, GetParam().options);
    c.run_forward();
    c.run_backward();
    Loss loss(c);
    const auto check = [&](const char* name, Tensor& input, const Tensor& gradient) {
        if (!gradient.view().given()) return;
        for_each_index(input, [&](const Index& i) {
            const double expected = loss.slope(input, i);
            const double got = gradient.at(i);
            ASSERT_NEAR(got, expected, 1e-9 * (1 + std::fabs(expected)))
                << name << " at " << i[0] << "," << i[1] << "," << i[2] << "," << i[3];
        });
    };
    check("dq", c.q, c.dq);
    check("dk", c.k, c.dk);
    check("dv", c.v, c.dv);
    check("dbias", c.bias, c.dbias);
    check("dsinks", c.sinks, c.dsinks);
}

TEST_P(Gradient, without_dlse_is_that_of_dlse_0) {
    Case c(GetParam().problem, GetParam().options);
    c.run_forward();
    fill(c.dlse, 0);
    c.run_backward();
    Case without(GetParam().problem, GetParam().options);
    without.run_forward();
    without.dlse = Tensor();
    without.run_backward();
    EXPECT_EQ(values(c.dq), values(without.dq));
    EXPECT_EQ(values(c.dk), values(without.dk));
    EXPECT_EQ(values(c.dv), values(without.dv));
    EXPECT_EQ(values(c.dbias), values(without.dbias));
    EXPECT_EQ(values(c.dsinks), values(without.dsinks));
}

TEST_P(Gradient, same_bits_with_any_number_of_threads) {
    Case one(GetParam().problem, GetParam().options);
    Case three = one;
    one.run_forward(), three.run_forward("reference.forward", 3);
    one.run_backward(), three.run_backward("reference.backward", 3);
    for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv, &Case::dbias, &Case::dsinks}) {
        EXPECT_EQ(bits(one.*t), bits(three.*t));
    }
}

INSTANTIATE_TEST_SUITE_P(Reference, Gradient, ::testing::ValuesIn(features()), feature_name);

Feature biased() { return bias_features().front(); }

TEST(GradientIdentities, score_gradients_of_a_row_sum_to_dlse) {
    Case c(biased().problem);
    c.run_forward();
    c.run_backward();
    for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 4; ++h) {
            for (std::int64_t i = 0; i < 5; ++i) {
                double sum = 0;
                for (std::int64_t j = 0; j < 7; ++j) sum += c.dbias.at(b, h, i, j);
                EXPECT_NEAR(sum, c.dlse.at(b, h, i), 1e-14);
            }
        }
    }
}

TEST(GradientIdentities, value_gradients_sum_to_those_of_the_outputs) {
    // Each row of P sums to 1, so the sum of dV over keys is that of dO over the rows and heads that read it.
    Case c(small_problem());
    c.run_forward();
    c.run_backward();
    for (std::int64_t kv_head = 0; kv_head < 2; ++kv_head) {
        double of_values = 0, of_outputs = 0;
        for (std::int64_t j = 0; j < 7; ++j) of_values += c.dv.at(1, j, kv_head, 1);
        for (std::int64_t i = 0; i < 5; ++i)
            of_outputs += c.d_o.at(1, i, 2 * kv_head, 1) + c.d_o.at(1, i, 2 * kv_head + 1, 1);
        EXPECT_NEAR(of_values, of_outputs, 1e-13);
    }
}

TEST(GradientIdentities, grouped_heads_add_up_those_of_repeated_heads) {
    Case grouped(small_problem());
    Problem p = small_problem();
    p.heads_kv = 4;
    Case repeated(p);
    repeated.q = grouped.q, repeated.d_o = grouped.d_o, repeated.dlse = grouped.dlse;
    for_each_index(repeated.k, [&](const Index& i) { repeated.k.set(grouped.k.at(i[0], i[1], i[2] / 2, i[3]), i); });
    for_each_index(repeated.v, [&](const Index& i) { repeated.v.set(grouped.v.at(i[0], i[1], i[2] / 2, i[3]), i); });
    for (Case* c : {&grouped, &repeated}) c->run_forward(), c->run_backward();
    EXPECT_EQ(bits(grouped.o), bits(repeated.o));
    EXPECT_EQ(bits(grouped.lse), bits(repeated.lse));
    EXPECT_EQ(bits(grouped.dq), bits(repeated.dq));
    for_each_index(grouped.dk, [&](const Index& i) {
        const double sum = repeated.dk.at(i[0], i[1], 2 * i[2], i[3]) + repeated.dk.at(i[0], i[1], 2 * i[2] + 1, i[3]);
        ASSERT_NEAR(grouped.dk.at(i), sum, 1e-13);
    });
}

TEST(GradientIdentities, stored_outputs_are_not_trusted) {
    // P comes from q and k anew: a wrong forward can't hide in a backward that agrees with it.
    Case c(small_problem());
    c.run_forward();
    c.run_backward();
    Case wrong = c;
    fill(wrong.o, 1e3);
    fill(wrong.lse, -7);
    wrong.run_backward();
    EXPECT_EQ(bits(wrong.dq), bits(c.dq));
    EXPECT_EQ(bits(wrong.dk), bits(c.dk));
}

}  // namespace
}  // namespace tessera::test::gradient_test
