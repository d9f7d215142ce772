// SPDX-License-Identifier: Apache-2.0
//
// How far predictions are from measurements: Records against the model.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::measure {

/// The Problem that a Record is about. Throws Error(bad_data) for a dtype, a mask or a feature that it does not know;
/// "causal" alone is bottom-right. A ragged Record has no member lengths and can't be asked about.
Problem problem_of(const Record& record);

/// A Record beside its prediction.
struct Comparison {
    Record record;
    std::string kernels;  ///< whose, and which schedule: "flash-attention fa3"
    double predicted_ms = 0;
    model::Prediction prediction{};
    double error() const { return predicted_ms / record.ms - 1; }
};

/// Predictions for the Records that the model knows kernel and device of; the others are counted by reason.
struct Comparisons {
    std::vector<Comparison> rows;
    std::map<std::string, int> left_out;
};

/// `machine`: of the Records' device; null: found by its name.
Comparisons compare(std::span<const Record> records, const model::Machine* machine = nullptr);

/// Errors of a group of comparisons.
struct Accuracy {
    std::string device;
    std::string kernels;
    std::string pass;
    int rows = 0;
    double median = 0;  ///< of the absolute relative error
    double mean = 0;
    double worst = 0;
    const Comparison* worst_row = nullptr;
};

/// One entry for each (device, kernels, pass), and one more with empty `kernels` for all rows of a device.
std::vector<Accuracy> summarise(const Comparisons& comparisons);

}  // namespace tessera::measure
