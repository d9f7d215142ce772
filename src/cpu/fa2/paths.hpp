// SPDX-License-Identifier: Apache-2.0
//
// fa2 in both rooms: forward.cc and backward.cc choose for a call.
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// In fp32 with queries in the lanes (cpu/simd): any problem.
namespace simd_path {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace simd_path

/// In bf16 tiles on a matrix unit (cpu/matrix): plans that it takes.
namespace matrix_path {
bool takes_forward(const Plan& plan);
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
bool takes_backward(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace matrix_path

}  // namespace tessera::cpu::fa2
