// SPDX-License-Identifier: Apache-2.0
#include "walk/by_hand.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/case.hpp"

namespace tessera::walk::by_hand_test {
namespace {

using test::Case;

/// The example as a Problem, its tensors filled with the whole numbers.
Case as_case(const Mask& mask) {
    Problem p = Problem::dense(1, kHandLen, 1, kHandDim);
    p.mask = mask;
    p.scale = std::log(2.0);
    Case c(p);
    for (std::int64_t i = 0; i < kHandLen; ++i) {
        for (std::int64_t x = 0; x < kHandDim; ++x) {
            const auto row = static_cast<std::size_t>(i), column = static_cast<std::size_t>(x);
            c.q.set(static_cast<double>(kHandQ[row][column]), 0, i, 0, x);
            c.k.set(static_cast<double>(kHandK[row][column]), 0, i, 0, x);
            c.v.set(static_cast<double>(kHandV[row][column]), 0, i, 0, x);
            c.d_o.set(static_cast<double>(kHandDo[row][column]), 0, i, 0, x);
        }
    }
    test::fill(c.dlse, 0);
    return c;
}

TEST(Fraction, arithmetic_is_exact) {
    EXPECT_EQ(Fraction(6, -4), Fraction(-3, 2));
    EXPECT_EQ(Fraction(1, 3) + Fraction(1, 6), Fraction(1, 2));
    EXPECT_EQ(Fraction(1, 3) - Fraction(1, 3), Fraction(0));
    EXPECT_EQ(Fraction(2, 3) / Fraction(4, 9), Fraction(3, 2));
    EXPECT_EQ(power_of_two(-3), Fraction(1, 8));
    EXPECT_EQ(power_of_two(3), Fraction(8));
    EXPECT_EQ(Fraction(-9, 4).text(), "-9/4");
}

TEST(ByHand, the_first_row_is_as_on_paper) {
    // q = (1, 0): scores 1, 0, 2, 1; weights 1/2, 1/4, 1, 1/2 of the largest; l = 9/4; O = (8, 1) / (9/4).
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        const Hand hand = work_by_hand(schedule, {});
        EXPECT_EQ(hand.rows[0].l, Fraction(9, 4));
        EXPECT_EQ(hand.rows[0].o[0], Fraction(32, 9));
        EXPECT_EQ(hand.rows[0].o[1], Fraction(4, 9));
    }
}

TEST(ByHand, the_kernels_give_the_same_numbers) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
            const Hand hand = work_by_hand(schedule, {.causal = causal});
            Case c = as_case({.causal = causal});
            c.run_forward(std::string("cpu.") + name_of(schedule) + ".forward");
            c.run_backward(std::string("cpu.") + name_of(schedule) + ".backward");
            for (std::int64_t i = 0; i < kHandLen; ++i) {
                const auto row = static_cast<std::size_t>(i);
                const double lse =
                    static_cast<double>(*hand.rows[row].m) * std::log(2.0) + std::log(hand.rows[row].l.value());
                EXPECT_NEAR(c.lse.at(0, 0, i), lse, 1e-6);
                for (std::int64_t x = 0; x < kHandDim; ++x) {
                    const auto column = static_cast<std::size_t>(x);
                    EXPECT_NEAR(c.o.at(0, i, 0, x), hand.rows[row].o[column].value(), 4e-6);
                    EXPECT_NEAR(c.dq.at(0, i, 0, x), std::log(2.0) * hand.rows[row].dq[column].value(), 1e-5);
                    EXPECT_NEAR(c.dk.at(0, i, 0, x), std::log(2.0) * hand.dk[row][column].value(), 1e-5);
                    EXPECT_NEAR(c.dv.at(0, i, 0, x), hand.dv[row][column].value(), 1e-5);
                }
            }
        }
    }
}

TEST(ByHand, hidden_tiles_are_left_out) {
    EXPECT_EQ(work_by_hand(Schedule::fa2, {}).steps.size(), 8U);
    const Hand causal = work_by_hand(Schedule::fa2, {.causal = Causal::bottom_right});
    EXPECT_EQ(causal.steps.size(), 6U);  // queries 0, 1 never meet keys 2, 3
    EXPECT_EQ(causal.rows[0].o[0], Fraction(4));
    EXPECT_EQ(causal.steps[0].coverage, Coverage::partial);
}

}  // namespace
}  // namespace tessera::walk::by_hand_test
