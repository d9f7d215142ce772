// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward: which room computes a call. They sum in other orders, each of which is fixed
// (docs/decisions/deterministic-backward.md).
#include <algorithm>

#include "cpu/fa2/paths.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {

std::size_t backward_workspace(const Plan& plan) {
    // A call that is observed runs in lanes, whatever would run else.
    const std::size_t bytes = simd_path::backward_workspace(plan);
    return matrix_path::takes_backward(plan) ? std::max(bytes, matrix_path::backward_workspace(plan)) : bytes;
}

void backward(const BackwardCall& call) {
    if (call.observer == nullptr && matrix_path::takes_backward(call.plan)) matrix_path::backward(call);
    else simd_path::backward(call);
}

}  // namespace tessera::cpu::fa2
