// SPDX-License-Identifier: Apache-2.0
//
// Records sorted for a report by device, by problem, and by library.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::report {

/// A measurement and its prediction by the model.
struct Row {
    measure::Record record;
    std::string label;  ///< library and schedule: "tessera fa3", "cuDNN"
    std::optional<model::Prediction> prediction;
    double off_by() const { return prediction->ms / record.ms - 1; }
};

/// Measurements that differ only in length (with its batch) and in the library and schedule.
struct Group {
    std::string pass;
    std::string dtype;
    std::string mask;  ///< "full", "causal", or the rule
    std::string heads;
    std::string head_dim;
    std::string others;     ///< threads, batch, features, queries: everything else that is unusual
    std::vector<Row> rows;  ///< sorted by the label, then by length
    int replaced = 0;       ///< measurements replaced by a newer one of the same case

    std::string title() const;     ///< "forward, causal, head_dim 128"
    std::string subtitle() const;  ///< "bf16, 16 heads, 8 threads"
    std::vector<const Row*> of(const std::string& label) const;
};

struct DeviceRows {
    std::string name;
    std::optional<model::Machine> machine{};  ///< empty: unknown to the model
    std::vector<std::string> labels;          ///< tessera's schedules first
    std::vector<Group> groups;                ///< forward first
    int replaced = 0;                         ///< sum over all groups
    std::size_t count() const;
};

struct Sorted {
    std::vector<DeviceRows> devices;
    std::map<std::string, int> left_out;  ///< number of Records left out, by reason
};

/// Sorts Records by device and group. Records other than a forward or backward are left out; the newest of several
/// measurements of one case counts. `machine` serves devices that the model does not know by name; it may be null.
/// Predictions are the model's; for a device without a machine they come from the Records.
Sorted sorted(std::span<const measure::Record> records, const model::Machine* machine = nullptr);

}  // namespace tessera::report
