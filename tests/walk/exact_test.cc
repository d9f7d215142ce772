// SPDX-License-Identifier: Apache-2.0
#include "walk/exact.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/case.hpp"
#include "tessera/error.hpp"

namespace tessera::walk::exact_test {
namespace {

using test::Case;

constexpr std::int64_t kRow = 70;

Case small_case() {
    Problem p = Problem::dense(2, 150, 4, 24);
    p.head_dim_v = 40;
    p.heads_kv = 2;
    p.mask.causal = Causal::bottom_right;
    return Case(p);
}

TEST(ExactRow, is_the_row_of_the_reference) {
    Case c = small_case();
    const Plan how = plan(c.problem, {.backend = Backend::reference, .threads = 1});
    forward(how, c.forward_args(), Workspace(how));
    const ExactRow exact = exact_row(c.problem, c.forward_args(), {1, 3, kRow});
    ASSERT_EQ(exact.o.size(), 40U);
    for (std::size_t x = 0; x < exact.o.size(); ++x)
        EXPECT_NEAR(exact.o[x], c.o.at(1, kRow, 3, static_cast<std::int64_t>(x)), 1e-6);
    EXPECT_NEAR(exact.lse, c.lse.at(1, 3, kRow), 1e-6);
}

TEST(ExactRow, the_last_step_is_exact_and_the_first_is_not) {
    for (const Schedule schedule : {Schedule::fa1, Schedule::fa2, Schedule::standard}) {
        Case c = small_case();
        const Plan how =
            plan(c.problem, {.backend = Backend::cpu, .schedule = schedule, .tile = Tile{16, 16}, .threads = 1});
        const Trace trace = trace_forward(how, c.forward_args(), {1, 3, kRow});
        const ExactRow exact = exact_row(c.problem, c.forward_args(), trace.selection);
        std::vector<double> errors;
        for (const Step& step : trace.steps) {
            const auto error = error_of(estimate_of(trace, step), exact);
            if (error) errors.push_back(*error);
        }
        ASSERT_GT(errors.size(), 4U) << name_of(schedule);
        EXPECT_GT(errors.front(), 0.1) << name_of(schedule);
        EXPECT_LT(errors.back(), 1e-6) << name_of(schedule);
    }
}

TEST(ExactRow, names_a_row_that_is_not_there) {
    Case c = small_case();
    EXPECT_THROW(exact_row(c.problem, c.forward_args(), {1, 3, 150}), Error);
}

}  // namespace
}  // namespace tessera::walk::exact_test
