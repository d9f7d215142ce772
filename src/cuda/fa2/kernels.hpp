// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernel/kernel.hpp"

namespace tessera::cuda::fa2 {

/// FlashAttention-2 on GPUs from compute capability 8.0 on.
std::vector<Kernel> kernels();

/// The kernel of the backward.
Kernel backward_kernel();

}  // namespace tessera::cuda::fa2
