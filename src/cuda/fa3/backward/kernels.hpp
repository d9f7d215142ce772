// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cuda::fa3 {

/// The row of the registry for FlashAttention-3's backward on Hopper.
Kernel backward_kernel();

}  // namespace tessera::cuda::fa3
