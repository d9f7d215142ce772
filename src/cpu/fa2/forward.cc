// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward: chooses the path of a call. Both paths have the same loop order; read simd/forward.cc first.
#include <algorithm>

#include "cpu/fa2/paths.hpp"
#include "cpu/fa2/stack_heads.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {
namespace {

/// An observed call runs on the SIMD path: the matrix path has no fp32 tiles to show.
bool runs_on_matrix(const ForwardCall& call) {
    return call.observer == nullptr && matrix_path::takes_forward(call.plan);
}

/// An observed or counted call doesn't stack heads: it reports the tiles of the original problem.
bool runs_stacked(const ForwardCall& call) {
    return call.observer == nullptr && call.counters == nullptr && stackable(call.plan.problem);
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    // The workspace suffices for each path that forward() may choose.
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
