// SPDX-License-Identifier: Apache-2.0
//
// Lessons 17 to 22: what is said of wrong answers, and the numbers that exercises and pictures stand on.
#include "learn/serving.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "learn/answer.hpp"
#include "learn/lesson.hpp"
#include "tessera/error.hpp"

namespace tessera::learn::serving_test {
namespace {

struct Answer {
    Exercise (*exercise)();
    const char* text;
    const char* says;  ///< part of the reply
};

TEST(Serving, slips_are_named) {
    const Answer answers[] = {{merge_exercise, "20/11", "relative to its own m"},
                              {merge_exercise, "26/15", "the mean"},
                              {parts_cost_exercise, "0.787", "one direction"},
                              {parts_cost_exercise, "0.394", "its own O"},
                              {pages_exercise, "6300 * 128 / 1024", "a page that is begun"},
                              {pages_exercise, "26", "number of pages"},
                              {pages_exercise, "3328", "not the heads of queries"},
                              {group_exercise, "52", "not 4"},
                              {fp8_exercise, "1", "2 to the power"},
                              {fp8_exercise, "1.0227", "multiplies the error"},
                              {spacing_exercise, "4", "half of the distance"},
                              {lazy_rescale_exercise, "23/16", "the true maximum"},
                              {lazy_rescale_exercise, "9/2", "second tile alone"},
                              {polynomial_exercise, "2", "how many times as long"},
                              {sink_exercise, "5/2", "without the sink"},
                              {sink_exercise, "5/4", "relative to m"},
                              {sink_exercise, "5/3", "is a score"},
                              {window_exercise, "48", "first two rows"},
                              {window_exercise, "32", "not aligned"},
                              {block_floor_exercise, "17.48", "cache is read too"},
                              {block_floor_exercise, "9.175", "has 2 bytes"},
                              {removed_gaps_exercise, "29.2", "share of the whole"},
                              {removed_gaps_exercise, "70.8", "what is left"}};
    for (const Answer& one : answers) {
        const Grade grade = grade_answer(one.exercise(), one.text);
        EXPECT_FALSE(grade.right) << one.text << ": " << grade.text;
        EXPECT_NE(grade.text.find(one.says), std::string::npos) << one.text << ": " << grade.text;
    }
}

TEST(Serving, e4m3_has_three_bits_after_the_point) {
    EXPECT_EQ(nearest_e4m3(1.1), 1.125);
    EXPECT_EQ(nearest_e4m3(40), 40);
    EXPECT_EQ(nearest_e4m3(17), 16) << "ties to even";
    EXPECT_EQ(nearest_e4m3(19), 20) << "ties to even";
    EXPECT_EQ(nearest_e4m3(15.9), 16);
    EXPECT_EQ(nearest_e4m3(447), 448);
    for (double x = 0.02; x < 448; x *= 1.01) EXPECT_LE(std::abs(nearest_e4m3(x) - x), x / 16) << x;
}

TEST(Serving, merged_parts_are_the_row) {
    const walk::HandRow first = row_over({4, 1, 0}, {3, -2, 5}), second = row_over({2, 6}, {1, 7});
    const walk::HandRow whole = row_over({4, 1, 0, 2, 6}, {3, -2, 5, 1, 7});
    const auto sum = [](const walk::HandRow& row) { return row.l * walk::Fraction(std::int64_t{1} << *row.m); };
    EXPECT_EQ(sum(first) + sum(second), sum(whole));
    EXPECT_EQ((sum(first) * first.o[0] + sum(second) * second.o[0]) / sum(whole), whole.o[0]);
}

TEST(Serving, clocks_of_a_tile_are_those_of_the_papers) {
    EXPECT_EQ(tile_clocks("h200", 128).gemms, 2048);
    EXPECT_EQ(tile_clocks("b200", 128).gemms, 1024);
    EXPECT_EQ(tile_clocks("b200", 128).exponentials, 1024);
    EXPECT_THROW(tile_clocks("b2000", 128), Error);
}

}  // namespace
}  // namespace tessera::learn::serving_test
