// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/append/launch.hpp"
#include "tessera/append.hpp"

namespace tessera::cuda {

/// append() for tensors of one CUDA device, whose shapes are checked. The host reads no lengths, slots or positions.
/// Throws Error(invalid_argument) naming a tensor that is not memory of the device.
void append(const AppendArgs& args, const AppendOptions& options, void* stream);

/// The arguments of the kernel for such tensors.
namespace append_rows {
Launch launch_of(const AppendArgs& args, const AppendOptions& options);
}

}  // namespace tessera::cuda
