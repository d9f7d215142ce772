// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/append/append.hpp"
#include "cuda/block/kernels.hpp"
#include "cuda/rows/device_rows.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda {

/// The CUDA backend's kernels for the registry, in order of preference.
std::vector<Kernel> kernels();

/// Why no kernel can run on this CUDA device, or nothing.
std::optional<std::string> unavailable(const Device& device);

}  // namespace tessera::cuda
