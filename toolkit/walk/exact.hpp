// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "walk/trace.hpp"

namespace tessera::walk {

/// One query by the definition, in fp64: the softmax over all keys that it sees at once.
struct ExactRow {
    std::vector<double> o;  // [head_dim_v]
    double lse = 0;         ///< -inf if it sees no key
};

/// Computes query `selection.row` of the call. Throws as trace_forward() for a selection outside the Problem.
ExactRow exact_row(const Problem& problem, const ForwardArgs& args, const Selection& selection);

/// Returns O / l of the followed query after this step: its output if no further key came. fa1 and standard keep O
/// divided. The result is [head_dim_v], or empty for steps without O.
std::vector<double> estimate_of(const Trace& trace, const Step& step);

/// Returns the root mean square error of an estimate relative to that of the exact row; empty if either is empty or 0.
std::optional<double> error_of(const std::vector<double>& estimate, const ExactRow& exact);

}  // namespace tessera::walk
