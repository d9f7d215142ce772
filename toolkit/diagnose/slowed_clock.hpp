// SPDX-License-Identifier: Apache-2.0
//
// A GPU that runs below its clock, as a trace's times of kernels imply it.
#pragma once

#include <optional>
#include <string>

#include "diagnose/diagnosis.hpp"

namespace tessera::diagnose {

/// All kinds of calls that the model predicts took longer than that by about the same factor.
struct SlowedClock {
    double least = 0, most = 0;  ///< measured time over the prediction's, of the kinds
    int kinds = 0;
    std::string machine{};  ///< "h200"
    double usual_ghz = 0;   ///< its clock with all units at work
    double ghz = 0;         ///< the clock that would explain the times
};

/// Nothing: the times agree with the predictions, they differ from each other, or fewer than two kinds are predicted.
std::optional<SlowedClock> slowed_clock(const Diagnosis& diagnosis, const Call& stated);

}  // namespace tessera::diagnose
