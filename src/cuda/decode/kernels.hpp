// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernel/kernel.hpp"

namespace tessera::cuda::decode {

/// The forward of few queries on many keys, on GPUs from compute capability 8.0 on.
std::vector<Kernel> kernels();

}  // namespace tessera::cuda::decode
