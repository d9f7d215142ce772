// SPDX-License-Identifier: Apache-2.0
//
// Runs every registered kernel on every case that it does not refuse. Results, LSE and gradients are compared with the
// fp64 reference, and no byte may be written outside of the outputs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check/run_case.hpp"
#include "kernels/support.hpp"
#include "long_run.hpp"

namespace tessera::check::all_kernels_test {
namespace {

constexpr std::uint64_t kSeed = 20240607;
const std::uint64_t kRandomCases = long_run() ? 1500 : 150;

/// Runs one case on all kernels. Those of the CPU take all cases, but for the backward of a cache; feature_cases_test
/// lists what the others must take.
void expect_all_kernels_right(const Case& which) {
    SCOPED_TRACE(which.describe());
    CaseRunner runner(which);
    for (const KernelInfo& kernel : kernels()) {
        const Outcome outcome = runner.run(kernel);
        EXPECT_TRUE(outcome.pass()) << to_command(which, kernel.name) << "\n" << outcome.report.describe();
        const bool no_gradient = which.problem.kv_lengths && kernel.pass == Pass::backward;
        if (kernel.backend != Backend::cuda && !no_gradient) {
            EXPECT_FALSE(outcome.refusal) << kernel.name << " refused: " << *outcome.refusal;
        }
    }
}

class CornerCase : public testing::TestWithParam<Case> {};
TEST_P(CornerCase, every_kernel_is_right) { expect_all_kernels_right(GetParam()); }
INSTANTIATE_TEST_SUITE_P(AllKernels, CornerCase, testing::ValuesIn(corner_cases()),
                         [](const auto& which) { return which.param.id; });

// Random cases run in groups, so that one program start does not cost more than the cases.
class RandomCases : public testing::TestWithParam<std::uint64_t> {};
constexpr std::uint64_t kGroup = 10;
TEST_P(RandomCases, every_kernel_is_right) {
    for (std::uint64_t i = GetParam(); i < GetParam() + kGroup; ++i)
        expect_all_kernels_right(random_case(random_seed(kSeed), i));
}
INSTANTIATE_TEST_SUITE_P(AllKernels, RandomCases, testing::Range<std::uint64_t>(0, kRandomCases, kGroup));

/// Prints at the end which kernels ran. Many tests ask every kernel, and skip those that refuse.
class SaysWhoRan : public testing::Environment {
    void TearDown() override {
        for (const auto& [kernel, counts] : asked()) {
            fmt::print("{}: ran {} times, refused {}, had no device {}\n", kernel, counts.ran, counts.refused,
                       counts.no_device);
            testing::Test::RecordProperty("ran_" + kernel, counts.ran);
            testing::Test::RecordProperty("refused_" + kernel, counts.refused);
        }
    }
};
const testing::Environment* const kSaysWhoRan = testing::AddGlobalTestEnvironment(new SaysWhoRan);

}  // namespace
}  // namespace tessera::check::all_kernels_test
