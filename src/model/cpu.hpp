// SPDX-License-Identifier: Apache-2.0
//
// The model's constants for tessera's CPU kernels, by dtype and pass. They stand in if `tessera calibrate` has not
// measured the machine's own kernels.
#pragma once

#include <span>
#include <string>

#include "model/parts.hpp"

namespace tessera::model {

using CpuConstants = KernelShares;

// The Records that constants were fitted on.
inline constexpr const char* kMatrixRecords = "bench/results/cpu/probes_95001_xeon16.jsonl";
inline constexpr const char* kSchedulesRecords = "bench/results/cpu/schedules_xeon16.jsonl";
inline constexpr const char* kFewQueriesRecords = "bench/results/cpu/probes_71001_few_epyc2.jsonl";

struct CpuFamily {
    const char* name;
    const char* fitted_on;  ///< Records behind the constants; "": not kept
    CpuConstants constants;
};

std::span<const CpuFamily> cpu_families();

/// The family that predict_cpu() uses if the machine's own kernels were not measured.
const CpuFamily& cpu_family_of(const Question& question);

inline constexpr std::int64_t kLanes = 16;        ///< queries per vector of lanes; ends are padded to them
inline constexpr std::int64_t kMatrixPanel = 32;  ///< queries of a panel on the matrix path

/// Does fp32 run as three bf16 parts? It does if six MMAs on the matrix unit are much faster than one multiply-add.
bool in_parts(const Question& question);

/// Does the call run fa2's kernels for few queries per head (cpu/simd/few_queries.hpp)? They have no AMX variant.
bool runs_few_queries(const Question& question);

/// The elements of S that they compute: all keys that some query sees, without padding.
std::int64_t elements_of_few_queries(const Problem& problem, const schedule::Workload& workload);

/// Does the call run on a matrix unit?
bool runs_on_matrix_unit(const Question& question);

/// Is it a forward of standard or fa1, which have their own constants?
bool is_standard_or_fa1(const Question& question);

/// The kind of kernel that the machine may have measured: "bf16 forward".
std::string cpu_kernel_kind(Schedule schedule, Pass pass, DType dtype);

/// All kinds that cpu_kernel_kind() can return.
std::span<const std::string> cpu_kernel_kinds();

/// The measurement of such kernels on the machine, which may include tiles; null: none.
const MeasuredKernels* measured_of(const Question& question);

/// The constants that predict_cpu() uses: those measured for such kernels, otherwise the family's. On a machine that
/// measured other kernels, start_us and contended_speed are the medians of those, since they belong to the host.
KernelShares shares_of(const Question& question);

/// The computed elements of S of all heads. The ends of rows and a mask's edge are padded to whole lanes, on a matrix
/// unit to whole tiles.
std::int64_t computed_elements(const schedule::Workload& workload, bool on_matrix_unit);

/// The computed elements that run the mask code on a matrix unit. In the forward these are all elements of a panel and
/// a block of keys, if a mask cuts them or the keys end within a tile. In the backward they are those of a strip and a
/// block of queries, if a mask cuts them or the queries end within a tile.
std::int64_t masked_elements(const schedule::Workload& workload);

/// predict_cpu() with these constants.
void predict_cpu_family(const Question& question, const CpuConstants& constants, Prediction& prediction);

}  // namespace tessera::model
