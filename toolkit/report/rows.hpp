// SPDX-License-Identifier: Apache-2.0
//
// Records sorted for a report: by device, by what was computed, by who computed it.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::report {

/// A measurement, and what the model says of it.
struct Row {
    measure::Record record;
    std::string who;  ///< "tessera fa3", "cuDNN"
    std::optional<model::Prediction> prediction;
    double off_by() const { return prediction->ms / record.ms - 1; }
};

/// Measurements that differ in length (and in the batch that goes with it) and in who computed them.
struct Group {
    std::string pass;
    std::string dtype;
    std::string mask;  ///< "full", "causal", or the rule
    std::string heads;
    std::string head_dim;
    std::string others;     ///< threads, batch, features, queries: what else is not as usual
    std::vector<Row> rows;  ///< by who, then by length
    int replaced = 0;       ///< measurements of which a newer one of the same case counts

    std::string title() const;     ///< "forward, causal, head_dim 128"
    std::string subtitle() const;  ///< "bf16, 16 heads, 8 threads"
    std::vector<const Row*> of(const std::string& who) const;
};

struct DeviceRows {
    std::string name;
    std::optional<model::Machine> machine{};  ///< none: not known to the model
    std::vector<std::string> who;             ///< tessera's schedules first
    std::vector<Group> groups;                ///< forward first
    int replaced = 0;                         ///< of all groups
    std::size_t count() const;
};

struct Sorted {
    std::vector<DeviceRows> devices;
    std::map<std::string, int> left_out;  ///< how many Records were not taken, by reason
};

/// Records that are no forward or backward are left out; of several measurements of one case the newest counts.
/// `machine`: of the devices that the model does not know by name; null: none. Predictions are the model's; for a
/// device without a machine they are those among the Records.
Sorted sorted(std::span<const measure::Record> records, const model::Machine* machine = nullptr);

}  // namespace tessera::report
