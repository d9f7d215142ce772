// SPDX-License-Identifier: Apache-2.0
//
// A measurement beside what the model says: its prediction, and the roofs that no figure can pass.
#pragma once

#include <optional>
#include <string>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::measure {

/// What the model says of the call that a Record measured, on `machine` or, when null, on the one that its device
/// names. Nothing when the machine, the problem or the kernel is not known to the model.
std::optional<model::Prediction> predict(const Record& measured, const model::Machine* machine = nullptr);

/// The prediction as a Record of what = "predicted": case and device of the measured one, date, versions and commit as
/// given there.
Record record_of(const model::Prediction& prediction, const Record& measured);

/// Why the figure can't be right: the products would take longer at the highest clock, or reading the inputs once from
/// memory (caches were cold). Nothing when it is below these roofs.
struct AboveRoof {
    std::string reason;
    bool certain = true;  ///< false: the roof is an estimate of the machine, so the figure may be right after all
};
std::optional<AboveRoof> above_roof(const Record& measured, const Problem& problem, const model::Machine& machine);

}  // namespace tessera::measure
