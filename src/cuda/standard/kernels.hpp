// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernel/kernel.hpp"

namespace tessera::cuda::standard {

/// Attention in three kernels with S and P in memory, on every GPU from compute capability 8.0 on.
std::vector<Kernel> kernels();

}  // namespace tessera::cuda::standard
