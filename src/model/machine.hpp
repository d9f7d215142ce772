// SPDX-License-Identifier: Apache-2.0
//
// The public Machine (tessera/machine.hpp) in this namespace, with functions that only the library uses.
#pragma once

#include "cuda/host/kernel_table.hpp"
#include "model/kernel_shares.hpp"
#include "tessera/machine.hpp"

namespace tessera::model {

using tessera::find_machine;
using tessera::for_each_quantity;
using tessera::Machine;
using tessera::machine_of_device;
using tessera::MachineKind;
using tessera::machines;
using tessera::Quantity;
using tessera::validate;

/// bf16 MMAs per fp32 MMA in parts, on a CPU's matrix unit (cpu/matrix/units.hpp) and on a GPU (cuda/tile/parts.cuh).
inline constexpr double kMmasPerFp32 = 6;

/// Registers of a multiprocessor: 65,536 of 4 bytes from compute capability 3.0 on (CUDA C++ Programming Guide).
inline constexpr double kRegisterBytes = 65536 * 4;

/// The valid range of a number of MeasuredKernels. A number outside it comes from a failed measurement.
struct ShareRange {
    double least;
    double most;
    bool has(double value) const { return value >= least && value <= most; }
};

/// The range of a share by its name in for_each_share().
ShareRange range_of_share(std::string_view name);

/// Are all shares in their ranges?
bool in_range(const KernelShares& shares);

/// The limits of a GPU that CUDA kernels check (cuda/rows).
cuda::Limits limits_of(const Machine& machine);

}  // namespace tessera::model
