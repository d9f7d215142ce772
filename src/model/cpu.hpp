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

/// The kind of kernel that the machine may have measured: "bf16 forward".
std::string cpu_kernels_of(Schedule schedule, Pass pass, DType dtype);

/// predict_cpu() with these constants.
void predict_cpu_family(const Question& question, const CpuConstants& constants, Prediction& prediction);

}  // namespace tessera::model
