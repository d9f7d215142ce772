// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward: which room computes a call. The loop order is the same in both; simd/forward.cc is the one to read
// first.
#include <algorithm>

#include "cpu/fa2/paths.hpp"
#include "cpu/fa2/stack_heads.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {
namespace {

/// A call that is observed runs in lanes, whatever would run else: the matrix unit has no tiles in fp32 to show.
bool runs_on_matrix(const ForwardCall& call) {
    return call.observer == nullptr && matrix_path::takes_forward(call.plan);
}

/// A call that is observed or counted doesn't stack: its tiles are those of the problem as it is.
bool runs_stacked(const ForwardCall& call) {
    return call.observer == nullptr && call.counters == nullptr && stackable(call.plan.problem);
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    // Enough for each of the ways that forward() may take.
    std::size_t bytes = simd_path::forward_workspace(plan);
    if (matrix_path::takes_forward(plan)) bytes = std::max(bytes, matrix_path::forward_workspace(plan));
    if (stackable(plan.problem)) {
        const Plan rows = stacked(plan);
        bytes = std::max(bytes, matrix_path::takes_forward(rows) ? matrix_path::forward_workspace(rows)
                                                                 : simd_path::forward_workspace(rows));
    }
    return bytes;
}

void forward(const ForwardCall& call) {
    if (runs_stacked(call)) {
        const Plan plan = stacked(call.plan);
        const ForwardArgs args = stacked(call.args, call.plan.problem.group());
        return forward({plan, args, call.workspace, call.parallel_for, nullptr, call.stream, nullptr});
    }
    if (runs_on_matrix(call)) matrix_path::forward(call);
    else simd_path::forward(call);
}

}  // namespace tessera::cpu::fa2
