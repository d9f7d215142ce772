// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// The forward of problems that packed_fits().
std::size_t forward_packed_workspace(const Plan& plan);
void forward_packed(const ForwardCall& call);

}  // namespace tessera::cpu::fa2
