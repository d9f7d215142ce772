// SPDX-License-Identifier: Apache-2.0
//
// Every registered kernel x every case that it does not refuse: results, LSE and gradients against the fp64 reference,
// and no byte written where none belongs.
#include <gtest/gtest.h>

#include "check/run_case.hpp"

namespace tessera::check {
namespace {

constexpr std::uint64_t kSeed = 20240607;
constexpr std::uint64_t kRandomCases = 150;

/// Runs one case on all kernels; some kernel has to take it, in each pass.
void expect_all_kernels_right(const Case& which) {
    SCOPED_TRACE(which.describe());
    CaseRunner runner(which);
    int ran[2] = {0, 0};
    for (const KernelInfo& kernel : kernels()) {
        const Outcome outcome = runner.run(kernel);
        EXPECT_TRUE(outcome.pass()) << to_command(which, kernel.name) << "\n" << outcome.report.describe();
        if (!outcome.refusal) ++ran[static_cast<int>(kernel.pass)];
    }
    EXPECT_GT(ran[0], 0) << "no kernel computes the forward";
    EXPECT_GT(ran[1], 0) << "no kernel computes the backward";
}

class CornerCase : public testing::TestWithParam<Case> {};
TEST_P(CornerCase, every_kernel_is_right) { expect_all_kernels_right(GetParam()); }
INSTANTIATE_TEST_SUITE_P(all_kernels, CornerCase, testing::ValuesIn(corner_cases()),
                         [](const auto& which) { return which.param.id; });

// In groups, so that one program start does not cost more than the cases.
class RandomCases : public testing::TestWithParam<std::uint64_t> {};
constexpr std::uint64_t kGroup = 10;
TEST_P(RandomCases, every_kernel_is_right) {
    for (std::uint64_t i = GetParam(); i < GetParam() + kGroup; ++i) expect_all_kernels_right(random_case(kSeed, i));
}
INSTANTIATE_TEST_SUITE_P(all_kernels, RandomCases, testing::Range<std::uint64_t>(0, kRandomCases, kGroup));

}  // namespace
}  // namespace tessera::check
