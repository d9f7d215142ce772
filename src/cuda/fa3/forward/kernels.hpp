// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernel/kernel.hpp"

namespace tessera::cuda::fa3 {

/// FlashAttention-3 on Hopper, in order of preference.
std::vector<Kernel> kernels();

}  // namespace tessera::cuda::fa3
