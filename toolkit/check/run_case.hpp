// SPDX-License-Identifier: Apache-2.0
//
// Runs a Case on kernels and checks every effect: the results, and the memory that must not change.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "check/case.hpp"
#include "check/compare.hpp"
#include "tessera/attention.hpp"
#include "tessera/kernel.hpp"

namespace tessera::check {

/// The outcome of one case on one kernel.
struct Outcome {
    std::optional<std::string> refusal;  ///< reason of the plan or the call for refusing; then nothing ran
    bool may_refuse = true;              ///< limits.hpp allows the refusal, or the device is missing
    Report report;                       ///< results, and one more row "memory" if a byte changed that should not
    bool pass() const { return refusal.has_value() ? may_refuse : report.pass(); }
};

/// The inputs of a case and their gold, made once and used for every kernel.
class CaseRunner {
 public:
    explicit CaseRunner(const Case& which);
    ~CaseRunner();

    /// Runs the kernel's pass on fresh, poisoned outputs and workspace. A kernel that refuses the case's tile runs with
    /// its own. The backward gets the O and LSE of the reference, rounded to their dtypes.
    Outcome run(const KernelInfo& kernel, const Execution& how = {});

    const Problem& problem() const;
    /// The inputs; outputs are not set.
    const ForwardArgs& forward_inputs() const;
    const BackwardArgs& backward_inputs() const;
    const ForwardGold& forward_gold();
    const BackwardGold& backward_gold();

 private:
    struct State;
    std::unique_ptr<State> state_;
};

Outcome run_case(const Case& which, const KernelInfo& kernel);

}  // namespace tessera::check
