// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cuda/decode/launch.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda::decode {

/// The forward of few queries on many keys, on GPUs from compute capability 8.0 on.
std::vector<Kernel> kernels();

/// The arguments of a call's kernels, without its workspace. `params`: those of the call.
Launch launch_of(const ForwardCall& call, const ForwardParams& params);

}  // namespace tessera::cuda::decode
