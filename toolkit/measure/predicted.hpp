// SPDX-License-Identifier: Apache-2.0
//
// Compares a measurement with the model: the prediction, and the roofs that no measurement can exceed.
#pragma once

#include <optional>
#include <string>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::measure {

/// Predicts the call that a Record measured, on `machine` or, if null, on the machine that its device names. Empty if
/// the model does not know the machine, the problem or the kernel.
std::optional<model::Prediction> predict(const Record& measured, const model::Machine* machine = nullptr);

/// Returns the prediction as a Record with what = "predicted". Case, device, date, versions and commit are those of
/// `measured`.
Record record_of(const model::Prediction& prediction, const Record& measured);

/// The reason why a measured time cannot be right: the MMAs take longer at the highest clock, or reading the inputs
/// once from memory does (caches were cold). Empty if the time respects these roofs.
struct AboveRoof {
    std::string reason;
    bool certain = true;  ///< false: the roof is an estimate of the machine, so the time may be right
};
std::optional<AboveRoof> above_roof(const Record& measured, const Problem& problem, const model::Machine& machine);

}  // namespace tessera::measure
