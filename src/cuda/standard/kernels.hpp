// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernel/kernel.hpp"

namespace tessera::cuda::standard {

/// Attention with S and P in memory, and its backward, on every GPU from compute capability 8.0 on.
std::vector<Kernel> kernels();

/// The kernel of the backward.
Kernel backward_kernel();

}  // namespace tessera::cuda::standard
