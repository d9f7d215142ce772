// SPDX-License-Identifier: Apache-2.0
//
// Measures the roofs of this machine: a CPU by running code, a GPU from the Records of bench/micro.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "measure/calibrate_kernels.hpp"
#include "measure/record.hpp"
#include "model/machine.hpp"

namespace tessera::measure {

/// Called before each measurement with the name of what is measured.
using CalibrationProgress = std::function<void(const std::string& what)>;

/// Measures the roofs of this host on one thread and on `threads` (0: all that the process may use). It times
/// multiply-adds, MMAs of bf16 tiles, tessera's own exponential, the clock, and the start of a parallel loop. It also
/// times reads from the second and last level of cache and from memory. Takes about 4 seconds.
model::Machine measure_roofs(int threads, const CalibrationProgress& progress);

/// Number of measurements that measure_roofs() reports.
inline constexpr int kRoofMeasurements = 9;

/// Calls measure_roofs() and times a few calls of each kind of the library's kernels. Takes 10 seconds on two cores, 40
/// on sixteen.
model::Machine calibrate_cpu(int threads, const CalibrationProgress& progress);

/// Number of measurements that calibrate_cpu() reports.
inline constexpr int kCpuMeasurements = kRoofMeasurements + kProbeRounds * kKernelKinds;

/// Returns `start` (the datasheet) with every rate replaced that Records of bench/micro measured. Throws
/// Error(bad_data) if none of the Records is from bench/micro.
model::Machine calibrate_gpu(const model::Machine& start, std::span<const Record> micro);

}  // namespace tessera::measure
