// SPDX-License-Identifier: Apache-2.0
//
// The public Machine (tessera/machine.hpp) under the names of this room, and what only the library asks of it.
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

/// Products of bf16 parts that one fp32 product takes on a CPU's matrix unit (cpu/matrix/units.hpp).
inline constexpr double kProductsOfParts = 6;

/// Registers of a multiprocessor: 65,536 of 4 bytes from compute capability 3.0 on (CUDA C++ Programming Guide).
inline constexpr double kRegisterBytes = 65536 * 4;

/// From what to what a number of measured kernels can be: beyond, the timing went wrong.
struct ShareRange {
    double least;
    double most;
    bool has(double value) const { return value >= least && value <= most; }
};

/// By the name that for_each_share() has.
ShareRange range_of_share(std::string_view name);

/// Are all of them such as can be?
bool in_range(const KernelShares& shares);

/// What a CUDA kernel asks of a GPU (cuda/rows).
cuda::Limits limits_of(const Machine& machine);

}  // namespace tessera::model
