// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "kernel/kernel.hpp"

namespace tessera {

/// Every kernel of this build in order of preference: one row per kernel, the reference last.
std::span<const Kernel> registry();

/// The row that a KernelInfo of kernels() belongs to.
const Kernel& kernel_of(const KernelInfo& info);

}  // namespace tessera
