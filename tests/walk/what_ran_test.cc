// SPDX-License-Identifier: Apache-2.0
//
// A walk shows the kernel of the SIMD path. On a machine with a matrix unit a call without an observer runs another
// one, and the plan and the walk say so. The test multiplies no tile on a unit, so it can pretend on every machine that
// there is one.
#include <gtest/gtest.h>

#include "core/case.hpp"
#include "cpu/matrix/primitives.hpp"
#include "printed.hpp"
#include "walk/trace.hpp"

namespace tessera::walk::what_ran_test {
namespace {

using cpu::matrix::Unit;

class WhatRan : public testing::TestWithParam<Unit> {
 protected:
    void SetUp() override { cpu::matrix::set_unit_for_test(GetParam(), GetParam() == Unit::amx); }
    void TearDown() override { cpu::matrix::set_unit_for_test(unit_, fp32_); }
    static Plan plan_of(DType dtype, Pass pass, Schedule schedule = Schedule::fa2) {
        return plan(Problem::dense(1, 40, 2, 16, dtype),
                    {.pass = pass, .backend = Backend::cpu, .schedule = schedule, .threads = 1});
    }

 private:
    Unit unit_ = cpu::matrix::unit();
    bool fp32_ = cpu::matrix::packing_pays(DType::fp32);
};
INSTANTIATE_TEST_SUITE_P(Cpu, WhatRan, testing::Values(Unit::none, Unit::dot, Unit::amx), [](const auto& unit) {
    return unit.param == Unit::none ? "none" : unit.param == Unit::dot ? "dot" : "amx";
});

TEST_P(WhatRan, the_plan_names_the_unit_that_multiplies) {
    const std::string unit = cpu::matrix::name_of(GetParam());
    EXPECT_EQ(unit.empty(), GetParam() == Unit::none);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        EXPECT_EQ(plan_of(DType::bf16, pass).matrix_unit, unit);
        EXPECT_EQ(plan_of(DType::fp32, pass).matrix_unit, GetParam() == Unit::amx ? unit : "");
        EXPECT_EQ(plan_of(DType::fp16, pass).matrix_unit, "");
        EXPECT_EQ(plan_of(DType::bf16, pass, Schedule::fa1).matrix_unit, "");
        const std::string text = plan_of(DType::bf16, pass).describe();
        EXPECT_EQ(text.find("products on " + unit) != std::string::npos, !unit.empty()) << text;
    }
}

TEST_P(WhatRan, a_walk_says_which_words_it_shows_and_which_run_otherwise) {
    const Plan how = plan_of(DType::fp32, Pass::forward);
    test::Case c(how.problem);
    const Trace trace = trace_forward(how, c.forward_args(), {});
    EXPECT_FALSE(trace.steps.empty()) << "an observed call runs in lanes on every machine";
    const std::string text = what_ran(trace.plan);
    EXPECT_NE(text.find("cpu/simd"), std::string::npos);
    EXPECT_EQ(text.find("cpu/matrix") != std::string::npos, GetParam() == Unit::amx) << text;
    EXPECT_EQ(text.find("on AMX") != std::string::npos, GetParam() == Unit::amx) << text;
}

}  // namespace
}  // namespace tessera::walk::what_ran_test
