// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward: chooses the path of a call. The paths sum in different orders, each of which is fixed
// (docs/decisions/deterministic-backward.md).
#include <algorithm>

#include "cpu/fa2/paths.hpp"
#include "cpu/fa2/simd/few_gradients.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {

std::size_t backward_workspace(const Plan& plan) {
    // The workspace suffices for each path that backward() may choose.
    std::size_t bytes = simd_path::backward_workspace(plan);
    if (matrix_path::takes_backward(plan)) bytes = std::max(bytes, matrix_path::backward_workspace(plan));
    if (simd_path::takes_few_gradients(plan)) bytes = std::max(bytes, simd_path::few_gradients_workspace(plan));
    return bytes;
}

void backward(const BackwardCall& call) {
    // An observed call runs on the SIMD path.
    if (call.observer != nullptr) return simd_path::backward(call);
    if (simd_path::takes_only_few_gradients(call.plan)) return simd_path::few_gradients(call);
    if (!matrix_path::takes_backward(call.plan)) return simd_path::backward(call);
    matrix_path::backward(call);
    // Few queries have the bits of the SIMD path beside longer sequences, too: a sequence's gradients don't depend on
    // its neighbours. They are computed again, since leaving them out above would not pay.
    if (!call.plan.problem.ragged || !simd_path::takes_few_gradients(call.plan)) return;
    simd_path::few_gradients({call.plan, call.args, call.workspace, call.parallel_for, nullptr, call.stream, nullptr,
                              call.skip_memory_check});
}

}  // namespace tessera::cpu::fa2
