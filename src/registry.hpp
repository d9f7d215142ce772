// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>

#include "kernel/kernel.hpp"

namespace tessera {

/// Every kernel of this build in order of preference: one row per kernel, the reference last.
std::span<const Kernel> registry();

/// The row that a KernelInfo of kernels() belongs to.
const Kernel& kernel_of(const KernelInfo& info);

/// Why this build and machine can't run anything with tensors on this device; empty when they can.
std::optional<std::string> unavailable(const Device& device);

}  // namespace tessera
