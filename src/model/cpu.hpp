// SPDX-License-Identifier: Apache-2.0
//
// What the model knows of tessera's CPU kernels: constants by dtype and pass. They stand in for what a machine's own
// kernels reach, where `tessera calibrate` has not measured it.
#pragma once

#include <span>
#include <string>

#include "model/parts.hpp"

namespace tessera::model {

using CpuConstants = KernelShares;

struct CpuFamily {
    const char* name;
    const char* fitted_on;  ///< Records behind the constants; "": none that are kept
    CpuConstants constants;
};

std::span<const CpuFamily> cpu_families();

/// The family that predict_cpu() takes where the machine's own kernels were not measured.
const CpuFamily& cpu_family_of(const Question& question);

inline constexpr std::int64_t kLanes = 16;        ///< queries at a time in lanes; ends are filled up to them
inline constexpr std::int64_t kMatrixPanel = 32;  ///< queries of a panel on a matrix unit

/// fp32 in three bf16 parts, where six products on the matrix unit are faster than one multiply-add.
bool in_parts(const Question& question);

/// On a matrix unit.
bool by_tiles(const Question& question);

/// standard and fa1 have constants of their own in the forward.
bool is_plain(const Question& question);

/// The kind of kernel that the machine may have measured: "bf16 forward".
std::string cpu_kernels_of(Schedule schedule, Pass pass, DType dtype);

/// All of them.
std::span<const std::string> cpu_kernel_kinds();

/// What was measured of such kernels on the machine, with tiles of their own; null: nothing.
const MeasuredKernels* measured_of(const Question& question);

/// What predict_cpu() takes: what was measured of such kernels; else the family's, and of a machine that measured
/// others their medians of what is the host's own, start_us and crowd.
KernelShares shares_of(const Question& question);

/// Elements of S of all heads that are computed: the ends of rows and a mask's edge are filled up to whole lanes, on a
/// matrix unit to whole tiles.
std::int64_t computed_elements(const schedule::Workload& workload, bool on_matrix_unit);

/// Those of them, on a matrix unit, that go through a mask: of a panel and a block of keys (backward: a strip and a
/// block of queries) all, where a mask cuts them or they end within a tile.
std::int64_t masked_elements(const schedule::Workload& workload);

/// predict_cpu() with these constants.
void predict_cpu_family(const Question& question, const CpuConstants& constants, Prediction& prediction);

}  // namespace tessera::model
