// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/device_rows.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {

/// DeviceRows of a CUDA device, with a stream of a higher priority than the default for exchanges.
std::unique_ptr<DeviceRows> device_rows(const Device& device);

}  // namespace tessera::cuda
