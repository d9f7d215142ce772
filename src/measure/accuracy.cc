// SPDX-License-Identifier: Apache-2.0
#include "measure/accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

namespace tessera::measure {
namespace {

/// What keeps a Record from being compared, or nothing and its comparison.
std::optional<std::string> try_compare(const Record& record, const model::Machine* machine, Comparison& result) {
    if (record.pass != "forward" && record.pass != "backward") return "neither forward nor backward";
    if (!record.features.empty()) return "features that are not modelled";
    if (!(record.ms > 0)) return "no time";
    if (record.pass == "backward" && record.deterministic && record.by != "tessera")
        return fmt::format("deterministic backward of {}: another kernel", record.by);
    if (machine == nullptr && model::machine_of_device(record.device) == nullptr)
        return fmt::format("no machine is known for \"{}\"", record.device);
    const auto prediction = predict(record, machine);
    if (!prediction) return fmt::format("no model of {} {} {}", record.by, record.schedule, record.pass);
    result.record = record;
    result.kernels = prediction->by;
    if (record.by != "cudnn") result.kernels += std::string(" ") + name_of(prediction->schedule);
    result.predicted_ms = prediction->ms;
    return std::nullopt;
}

Accuracy accuracy_of(std::span<const Comparison* const> rows) {
    Accuracy a;
    a.rows = static_cast<int>(rows.size());
    std::vector<double> errors;
    for (const Comparison* row : rows) {
        const double error = std::abs(row->error());
        errors.push_back(error);
        a.mean += error / static_cast<double>(rows.size());
        if (error >= a.worst) a.worst = error, a.worst_row = row;
    }
    std::sort(errors.begin(), errors.end());
    const std::size_t half = errors.size() / 2;
    a.median = errors.size() % 2 == 1 ? errors[half] : (errors[half - 1] + errors[half]) / 2;
    return a;
}

}  // namespace

Comparisons compare(std::span<const Record> records, const model::Machine* machine) {
    Comparisons result;
    for (const Record& record : records) {
        Comparison row;
        if (const auto reason = try_compare(record, machine, row)) ++result.left_out[*reason];
        else result.rows.push_back(std::move(row));
    }
    return result;
}

std::vector<Accuracy> summarise(const Comparisons& comparisons) {
    using Key = std::array<std::string, 3>;
    std::map<Key, std::vector<const Comparison*>> groups;
    std::map<std::string, std::vector<const Comparison*>> devices;
    for (const Comparison& row : comparisons.rows) {
        groups[{row.record.device, row.record.pass, row.kernels}].push_back(&row);
        devices[row.record.device].push_back(&row);
    }
    std::vector<Accuracy> result;
    for (const auto& [device, all] : devices) {
        for (const auto& [key, rows] : groups) {
            if (key[0] != device) continue;
            Accuracy a = accuracy_of(rows);
            a.device = device, a.pass = key[1], a.kernels = key[2];
            result.push_back(a);
        }
        Accuracy a = accuracy_of(all);
        a.device = device;
        result.push_back(a);
    }
    // Forward before backward.
    std::stable_sort(result.begin(), result.end(), [](const Accuracy& a, const Accuracy& b) {
        const auto rank = [](const Accuracy& x) { return x.kernels.empty() ? 2 : x.pass == "forward" ? 0 : 1; };
        return a.device == b.device && rank(a) < rank(b);
    });
    return result;
}

}  // namespace tessera::measure
