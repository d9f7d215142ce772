// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward: chooses the path of a call. The paths sum in different orders, each of which is fixed
// (docs/decisions/deterministic-backward.md).
#include <algorithm>

#include "cpu/fa2/paths.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {

std::size_t backward_workspace(const Plan& plan) {
    // An observed call runs on the SIMD path, so the workspace must suffice for both.
    const std::size_t bytes = simd_path::backward_workspace(plan);
    return matrix_path::takes_backward(plan) ? std::max(bytes, matrix_path::backward_workspace(plan)) : bytes;
}

void backward(const BackwardCall& call) {
    if (call.observer == nullptr && matrix_path::takes_backward(call.plan)) matrix_path::backward(call);
    else simd_path::backward(call);
}

}  // namespace tessera::cpu::fa2
