// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu {

/// The CPU backend's rows for the registry, in order of preference.
std::vector<Kernel> kernels();

}  // namespace tessera::cpu
