// SPDX-License-Identifier: Apache-2.0
//
// What the better kernel would gain: its predicted time beside the measured one, and what that is of a whole step.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/rules.hpp"
#include "model/machine.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::diagnose {

/// What was measured of one kind of calls; 0: not measured.
struct Measured {
    double call_ms = 0;  ///< GPU time of one call
    double calls = 0;
    double step_ms = 0;  ///< GPU time of everything in the trace, these calls included
};

struct Gain {
    SdpBackend backend{};
    std::string kernel{};                ///< "fa3 of flash-attention"; empty: the model has none
    double predicted_ms = 0;             ///< of one call
    double call_factor = 0;              ///< measured / predicted; 0 when nothing was measured
    double step_factor = 0;              ///< the whole step before / after (Amdahl); 0 when it was not measured
    std::string missing{};               ///< why there is no prediction; empty when there is one
    std::vector<std::string> caveats{};  ///< "never compared on this GPU", ...
};

/// Backends that are faster than `taken` as a rule on such a GPU, the fastest first. By the records of H200 and by what
/// kernels are compiled for, not for any one shape: gain() tells that.
std::vector<SdpBackend> faster_than(SdpBackend taken, const Gpu& gpu);

/// The model's machine for a GPU, by its name; null when it knows none.
const model::Machine* machine_of(const Gpu& gpu);

/// The Problem of a Call: nothing when shapes or dtypes are unknown or no attention that the model can count; why is
/// in `missing`. A mask tensor counts as one that hides nothing.
std::optional<Problem> problem_of(const Call& call, std::string& missing);

Gain gain(const Call& call, SdpBackend better, Pass pass, const Measured& measured);

}  // namespace tessera::diagnose
