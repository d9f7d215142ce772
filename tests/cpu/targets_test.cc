// SPDX-License-Identifier: Apache-2.0
//
// Runs the random cases of tests/kernels on CPU kernels, on every instruction set that this processor has.
#include "targets.hpp"

#include "check/run_case.hpp"
#include "long_run.hpp"

namespace tessera::cpu::targets_test {
namespace {

class Kernels : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, Kernels, testing::ValuesIn(usable_targets()), target_label);

TEST_P(Kernels, are_right_on_this_instruction_set) {
    int ran = 0;
    for (std::uint64_t index = 0; index < 25; ++index) {
        check::CaseRunner runner(check::random_case(random_seed(2026), index));
        for (const KernelInfo& kernel : kernels()) {
            if (kernel.backend != Backend::cpu) continue;
            const check::Outcome outcome = runner.run(kernel);
            ran += outcome.refusal ? 0 : 1;
            EXPECT_TRUE(outcome.pass()) << check::to_command(check::random_case(random_seed(2026), index), kernel.name)
                                        << "\n"
                                        << outcome.report.describe();
        }
    }
    EXPECT_GT(ran, 100);
}

}  // namespace
}  // namespace tessera::cpu::targets_test
