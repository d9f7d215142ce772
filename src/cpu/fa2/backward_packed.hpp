// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// The backward of problems that backward_packed_fits().
bool backward_packed_fits(const Plan& plan);
std::size_t backward_packed_workspace(const Plan& plan);
void backward_packed(const BackwardCall& call);

}  // namespace tessera::cpu::fa2
