// SPDX-License-Identifier: Apache-2.0
#include "walk/by_hand.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/case.hpp"

namespace tessera::walk::by_hand_test {
namespace {

using test::Case;

/// The example as a Problem, its tensors filled with the whole numbers.
Case as_case(const HandExample& example, const Mask& mask) {
    Problem p = Problem::dense(1, example.len_q(), 1, kHandDim);
    p.len_kv = example.len_kv();
    p.mask = mask;
    p.scale = std::log(2.0);
    Case c(p);
    const auto fill = [](auto& tensor, const HandMatrix& matrix) {
        for (std::size_t i = 0; i < matrix.size(); ++i) {
            for (std::size_t x = 0; x < kHandDim; ++x)
                tensor.set(static_cast<double>(matrix[i][x]), 0, static_cast<std::int64_t>(i), 0,
                           static_cast<std::int64_t>(x));
        }
    };
    fill(c.q, example.q), fill(c.k, example.k), fill(c.v, example.v), fill(c.d_o, example.d_o);
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
    // q = (1, 0): scores 0, 1, 2, 0; weights 1/4, 1/2, 1, 1/4 of the largest; l = 2; O = (5, 3) / 2.
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        const Hand hand = work_by_hand(schedule, {});
        EXPECT_EQ(hand.rows[0].l, Fraction(2));
        EXPECT_EQ(hand.rows[0].o[0], Fraction(5, 2));
        EXPECT_EQ(hand.rows[0].o[1], Fraction(3, 2));
    }
}

void expect_numbers_of_the_kernels(const HandExample& example, Schedule schedule, Causal causal) {
    const Hand hand = work_by_hand(example, schedule, {.causal = causal});
    Case c = as_case(example, {.causal = causal});
    c.run_forward(std::string("cpu.") + name_of(schedule) + ".forward");
    c.run_backward(std::string("cpu.") + name_of(schedule) + ".backward");
    const auto expect_row = [](auto& tensor, std::int64_t i, const HandVector& row, double factor, double tolerance) {
        for (std::size_t x = 0; x < kHandDim; ++x)
            EXPECT_NEAR(tensor.at(0, i, 0, static_cast<std::int64_t>(x)), factor * row[x].value(), tolerance);
    };
    for (std::int64_t i = 0; i < example.len_q(); ++i) {
        const HandRow& row = hand.rows[static_cast<std::size_t>(i)];
        const double lse = row.m ? static_cast<double>(*row.m) * std::log(2.0) + std::log(row.l.value()) : -INFINITY;
        if (row.m) EXPECT_NEAR(c.lse.at(0, 0, i), lse, 1e-6);
        else EXPECT_EQ(c.lse.at(0, 0, i), lse);
        expect_row(c.o, i, row.o, 1, 4e-6);
        expect_row(c.dq, i, row.dq, std::log(2.0), 1e-5);
    }
    for (std::int64_t j = 0; j < example.len_kv(); ++j) {
        expect_row(c.dk, j, hand.dk[static_cast<std::size_t>(j)], std::log(2.0), 1e-5);
        expect_row(c.dv, j, hand.dv[static_cast<std::size_t>(j)], 1, 1e-5);
    }
}

TEST(ByHand, the_kernels_give_the_same_numbers) {
    // Tiles that do not divide the lengths, and more queries than keys: the first queries see none.
    const HandExample own{.q = {{1, 0}, {0, 1}, {0, 0}, {1, 0}, {2, -1}},
                          .k = {{0, 1}, {1, 0}, {2, 0}},
                          .v = {{4, 0}, {0, 4}, {2, 2}},
                          .d_o = {{1, 0}, {0, 1}, {1, 1}, {0, 1}, {-1, 2}},
                          .tile = {2, 2}};
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
            expect_numbers_of_the_kernels(HandExample{}, schedule, causal);
            expect_numbers_of_the_kernels(own, schedule, causal);
        }
    }
}

TEST(ByHand, gradients_grow_tile_by_tile_to_the_same_sums) {
    const Hand hand = work_by_hand(Schedule::fa2, {.causal = Causal::bottom_right});
    ASSERT_EQ(hand.gradient_steps.size(), 3U);  // queries 0, 1 never meet keys 2, 3
    EXPECT_EQ(hand.gradient_steps[0].keys, (Range{0, 2}));
    EXPECT_EQ(hand.gradient_steps[1].queries, (Range{2, 4}));
    EXPECT_EQ(hand.gradient_steps[1].dk[0], hand.dk[0]);  // a column is done before the next begins
    EXPECT_EQ(hand.gradient_steps[2].dq[1], hand.rows[3].dq);
    EXPECT_NE(hand.gradient_steps[1].dq[1], hand.rows[3].dq);  // dQ is not: the next column adds to it
    EXPECT_EQ(work_by_hand(Schedule::standard, {}).gradient_steps.size(), 1U);
}

TEST(ByHand, numbers_that_cannot_be_told_are_refused) {
    const auto expect_refused = [](const HandExample& example, const std::string& argument) {
        try {
            work_by_hand(example, Schedule::fa2, {});
            ADD_FAILURE() << "expected a refusal of " << argument;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
            EXPECT_EQ(error.argument(), argument);
        }
    };
    expect_refused({.q = {}}, "q");
    expect_refused({.k = HandMatrix(9, {0, 0})}, "k");
    expect_refused({.v = {{1, 1}}}, "v");
    expect_refused({.d_o = {{1, 1}}}, "do");
    expect_refused({.q = {{10, 0}, {0, 0}, {0, 0}, {0, 0}}}, "q");
    expect_refused({.tile = {0, 2}}, "tile");
    // 162 apart: 2^162 is no fraction of 64 bits.
    expect_refused({.q = {{9, 9}}, .k = {{9, 9}, {0, 0}}, .v = {{1, 0}, {0, 1}}, .d_o = {{1, 0}}}, "numbers");
    EXPECT_THROW(Fraction(std::int64_t{1} << 62) * Fraction(4), Error);
    EXPECT_THROW(Fraction(1, (std::int64_t{1} << 40) + 1) + Fraction(1, (std::int64_t{1} << 40) - 1), Error);
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
