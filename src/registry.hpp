// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/device_rows.hpp"
#include "kernel/decode_block.hpp"
#include "kernel/kernel.hpp"
#include "tessera/append.hpp"

namespace tessera {

/// Every kernel of this build in order of preference: one row per kernel, the reference last.
std::span<const Kernel> registry();

/// The row that a KernelInfo of kernels() belongs to.
const Kernel& kernel_of(const KernelInfo& info);

/// Why this build and machine can't run anything with tensors on this device; empty when they can.
std::optional<std::string> unavailable(const Device& device);

/// append() for tensors of one CUDA device, whose shapes are checked. Throws Error(device_unavailable) if there is
/// none.
void append_on_cuda(const AppendArgs& args, const AppendOptions& options, void* stream);

/// DeviceRows of a CUDA device. Throws Error(device_unavailable) if there is none.
std::unique_ptr<DeviceRows> rows_on_cuda(const Device& device);

/// DeviceRows::add(), and RowCopies in one launch, on a stream of a CUDA device. Throw Error(device_unavailable) if
/// there is none.
void add_rows_on_cuda(const RowSums& sums, const Device& device, void* stream);
void copy_rows_on_cuda(const RowCopies& copies, const Device& device, void* stream);
/// The kernels of decode_block() for tensors on this device; null: this build has none.
const DecodeBlockKernels* decode_block_kernels(const Device& device);

}  // namespace tessera
