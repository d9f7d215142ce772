// SPDX-License-Identifier: Apache-2.0
//
// Predicts the gain of a better kernel: its predicted time beside the measured one, and its effect on a whole step.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/rules.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::diagnose {

/// Measured times of one kind of calls; 0: not measured.
struct Measured {
    double call_ms = 0;  ///< GPU time of one call
    double calls = 0;
    double step_ms = 0;  ///< GPU time of everything in the trace, these calls included
};

/// The time that a gain is counted from: that of the kernel which runs, without its launch.
struct Baseline {
    double ms = 0;               ///< 0: not known
    double error = 0;            ///< its error bar; 0 for a measured time
    bool at_least = false;       ///< `ms` is a lower bound
    std::string not_modelled{};  ///< features whose time the prediction lacks: "dropout"; empty: none
    std::string source{};        ///< "measured", "predicted as fa2 of flash-attention", "not predicted: ...", ...
    double predicted_ms = 0;     ///< beside a measured time, the model's own; 0: the model has no such kernel
    double predicted_error = 0;
};

struct Gain {
    SdpBackend backend{};
    std::string kernel{};     ///< "fa3 of flash-attention"; empty: the model has none
    double predicted_ms = 0;  ///< for one call with its launches
    double kernel_ms = 0;     ///< without them, as a profiler shows a kernel
    double error = 0;         ///< the prediction's error bar
    /// Features of the call whose time the prediction lacks: "dropout". The bar is wide enough for it.
    std::string not_modelled{};
    double call_factor = 0;  ///< baseline / kernel_ms, a lower bound if the baseline is; 0: no baseline
    bool at_most = false;    ///< `call_factor` is an upper bound: only the baseline has the time of `not_modelled`
    bool faster = false;     ///< by more than the errors of both
    /// the time of the whole step divided by its predicted time (Amdahl); 0: not measured
    double step_factor = 0;
    std::string missing{};               ///< why there is no prediction; empty if there is one
    std::vector<std::string> caveats{};  ///< limits of the prediction, in words
};

/// The Problem of a Call. Returns nothing, with the reason in `missing`, if shapes or dtypes are unknown or the model
/// cannot count it. A mask tensor is treated as one that hides no key, and is not part of the Problem.
std::optional<Problem> problem_of(const Call& call, std::string& missing);

/// The time of `ran` for this call: measured, predicted, by the table of an H200, or a bound for the math path.
Baseline baseline_of(const Call& call, SdpBackend ran, Pass pass, const Measured& measured);

/// The gain of running `call` by `backend`, which must take it.
Gain gain(const Call& call, SdpBackend backend, Pass pass, const Baseline& baseline, const Measured& measured);

}  // namespace tessera::diagnose
