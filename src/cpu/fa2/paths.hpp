// SPDX-License-Identifier: Apache-2.0
//
// The two paths of fa2; forward.cc and backward.cc choose for each call.
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// The SIMD path: fp32 with queries in the lanes (cpu/simd), for any problem.
namespace simd_path {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace simd_path

/// The matrix path: bf16 tiles on a matrix unit (cpu/matrix), for plans that takes_...() accepts.
namespace matrix_path {
bool takes_forward(const Plan& plan);
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
bool takes_backward(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace matrix_path

}  // namespace tessera::cpu::fa2
