// SPDX-License-Identifier: Apache-2.0
//
// The oracle: attention forward and backward as plain loops in fp64. Slow, and the definition of right.
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::reference {

std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
void backward(const BackwardCall& call);

/// The reference's rows for the registry.
std::vector<Kernel> kernels();

}  // namespace tessera::reference
