// SPDX-License-Identifier: Apache-2.0
//
// The entry points of the three schedules, one folder each. A workspace function lays out the same memory as its kernel
// and returns the bytes.
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu {

namespace standard {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace standard

namespace fa1 {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace fa1

namespace fa2 {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace fa2

}  // namespace tessera::cpu
