// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/device_rows.hpp"

namespace tessera::ranks {

/// DeviceRows of host memory.
std::unique_ptr<DeviceRows> host_rows();

}  // namespace tessera::ranks
