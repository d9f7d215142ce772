// SPDX-License-Identifier: Apache-2.0
//
// Predicts the gain of a better kernel: its predicted time beside the measured one, and its effect on a whole step.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/rules.hpp"
#include "model/machine.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::diagnose {

/// Measured times of one kind of calls; 0: not measured.
struct Measured {
    double call_ms = 0;  ///< GPU time of one call
    double calls = 0;
    double step_ms = 0;  ///< GPU time of everything in the trace, these calls included
};

struct Gain {
    SdpBackend backend{};
    std::string kernel{};     ///< "fa3 of flash-attention"; empty: the model has none
    double predicted_ms = 0;  ///< for one call
    double call_factor = 0;   ///< measured / predicted; 0 when nothing was measured
    /// the time of the whole step divided by its predicted time (Amdahl); 0: not measured
    double step_factor = 0;
    std::string missing{};               ///< why there is no prediction; empty if there is one
    std::vector<std::string> caveats{};  ///< limits of the prediction, in words
};

/// Backends that are usually faster than `taken` on such a GPU, the fastest first. The order comes from the Records of
/// an H200 and from the architectures that the kernels are compiled for. gain() predicts a single shape.
std::vector<SdpBackend> faster_than(SdpBackend taken, const Gpu& gpu);

/// The model's machine for a GPU, found by its name; null if the model knows none.
const model::Machine* machine_of(const Gpu& gpu);

/// The Problem of a Call. Returns nothing, with the reason in `missing`, if shapes or dtypes are unknown or the model
/// cannot count it. A mask tensor counts as one that hides nothing.
std::optional<Problem> problem_of(const Call& call, std::string& missing);

Gain gain(const Call& call, SdpBackend better, Pass pass, const Measured& measured);

}  // namespace tessera::diagnose
