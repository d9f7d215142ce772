// SPDX-License-Identifier: Apache-2.0
//
// What the model knows of tessera's CPU kernels: constants by dtype and pass. They hold for every CPU; a CPU differs in
// its Machine only.
#pragma once

#include <span>

#include "model/parts.hpp"

namespace tessera::model {

/// What the kernels of a dtype and pass leave exposed.
struct CpuConstants {
    double product_share;  ///< of the product rate that they reach
    double exp_share;  ///< of the exponentials' time: with the maximum, sums and rescaling, less what is under products
    double last;       ///< tasks that the last thread is later by, in tiles of queries (backward: of keys)
    double loops;      ///< starts of parallel loops that the call is worth
    double call_us;    ///< of a call, whatever its size: code and tables are cold
    double pack_ns = 0;  ///< of an element that is packed, with what it takes to fetch it
    double crowd = 1;    ///< share of a thread's speed that is left when all cores work, beyond the clock
};

struct CpuFamily {
    const char* name;
    const char* fitted_on;  ///< Records behind the constants; "": none that are kept
    CpuConstants constants;
};

std::span<const CpuFamily> cpu_families();

/// The family that predict_cpu() takes.
const CpuFamily& cpu_family_of(const Question& question);

/// predict_cpu() with these constants.
void predict_cpu_family(const Question& question, const CpuConstants& constants, Prediction& prediction);

}  // namespace tessera::model
