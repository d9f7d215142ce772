// SPDX-License-Identifier: Apache-2.0
//
// The roofs of the machine at hand: of the CPU by measuring, of a GPU from the Records of bench/micro.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "measure/calibrate_kernels.hpp"
#include "measure/record.hpp"
#include "model/machine.hpp"

namespace tessera::measure {

/// Told before each measurement: what is measured.
using CalibrationProgress = std::function<void(const std::string& what)>;

/// Measures the roofs of this host on one thread and on `threads` (0: all that the process may use): multiply-adds,
/// products of bf16 tiles, tessera's own exponential, the clock, reading from the second and last level of cache and
/// from memory, the start of a parallel loop. Takes about 4 seconds.
model::Machine measure_roofs(int threads, const CalibrationProgress& progress);

/// How many measurements measure_roofs() tells of.
inline constexpr int kRoofMeasurements = 9;

/// measure_roofs(), and a few calls of each kind of the library's kernels. Takes 10 seconds on two
/// cores, 40 on sixteen.
model::Machine calibrate_cpu(int threads, const CalibrationProgress& progress);

/// How many measurements calibrate_cpu() tells of.
inline constexpr int kCpuMeasurements = kRoofMeasurements + kProbeRounds * kKernelKinds;

/// `start` (the datasheet) with every rate that Records of bench/micro tell of replaced by what was measured. Throws
/// Error(bad_data) when none of the Records is one of bench/micro.
model::Machine calibrate_gpu(const model::Machine& start, std::span<const Record> micro);

}  // namespace tessera::measure
