// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime calls that mirrors need. Each throws an Error: out_of_memory, internal with the runtime's message,
// or device_unavailable in a build without CUDA.
#pragma once

#include <cstddef>

#include "tessera/tensor.hpp"

namespace tessera::device {

/// Number of usable devices; 0 without a driver.
int count_devices();

std::byte* allocate(const Device& device, std::size_t bytes);
void release(std::byte* memory) noexcept;
void fill(const Device& device, std::byte* memory, int byte, std::size_t bytes);
void copy_in(std::byte* to_device, const std::byte* from_host, std::size_t bytes);
void copy_out(std::byte* to_host, const std::byte* from_device, std::size_t bytes);

/// Waits for all work on the device.
void wait_for(const Device& device);

}  // namespace tessera::device
