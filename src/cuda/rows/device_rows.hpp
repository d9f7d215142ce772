// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/device_rows.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {

/// DeviceRows of a CUDA device, with a stream of a higher priority than the default for exchanges.
std::unique_ptr<DeviceRows> device_rows(const Device& device);

/// DeviceRows::add() on a stream of the device.
void add_rows(const RowSums& sums, const Device& device, void* stream);

/// All copies in one launch.
void copy_rows(const RowCopies& copies, const Device& device, void* stream);

}  // namespace tessera::cuda
