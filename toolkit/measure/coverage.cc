// SPDX-License-Identifier: Apache-2.0
#include "measure/coverage.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "model/baseline.hpp"
#include "model/machine.hpp"

namespace tessera::measure {
namespace {

double error_of(const Comparison& row) {
    return std::max(row.predicted_ms / row.record.ms, row.record.ms / row.predicted_ms) - 1;
}

/// The card and the source of a published row, such as "gb200, NVIDIA/cudnn-frontend llama3.1/gb200"; else empty.
std::string table_of(const Comparison& row) {
    const auto found = row.record.versions.find("source");
    const model::Machine* machine = model::machine_of_device(row.record.device);
    if (found == row.record.versions.end() || machine == nullptr) return "";
    std::string source = found->second;
    constexpr std::string_view kHost = "github.com/", kTree = "/tree/main/benchmark/";
    if (source.starts_with(kHost)) source.erase(0, kHost.size());
    if (const std::size_t tree = source.find(kTree); tree != std::string::npos) {
        const std::size_t end = source.rfind('/');
        const std::size_t folder = source.rfind('/', end - 1);
        source = source.substr(0, tree) + " " + source.substr(folder >= tree + kTree.size() ? folder + 1 : end + 1);
    }
    return machine->name + ", " + source;
}

}  // namespace

bool is_inside(const Comparison& row, double error) { return error_of(row) <= error; }

double bar_of(std::span<const Comparison* const> rows) {
    if (rows.empty()) return 1;
    std::vector<double> errors;
    for (const Comparison* row : rows) errors.push_back(error_of(*row));
    std::sort(errors.begin(), errors.end());
    const auto wanted = static_cast<std::size_t>(std::ceil(0.9 * static_cast<double>(errors.size() + 1)));
    return errors[std::min(errors.size(), wanted) - 1];
}

std::vector<Coverage> leave_one_table_out(const Comparisons& comparisons) {
    using Cell = std::tuple<std::string, bool>;
    const auto cell_of = [](const Comparison& row) {
        return Cell{row.record.pass, row.record.len_q == row.record.len_kv};
    };
    std::map<std::string, std::vector<const Comparison*>> tables;
    for (const Comparison& row : comparisons.rows) {
        if (model::baseline_of_records(row.record.by)) continue;
        if (row.held_out && !table_of(row).empty()) tables[table_of(row)].push_back(&row);
    }
    std::vector<Coverage> result;
    Coverage all;
    for (const auto& [name, rows] : tables) {
        std::map<Cell, std::vector<const Comparison*>> others;
        for (const auto& [other, its_rows] : tables) {
            if (other == name) continue;
            for (const Comparison* row : its_rows) others[cell_of(*row)].push_back(row);
        }
        Coverage one{.of = name};
        for (const Comparison* row : rows) {
            const auto found = others.find(cell_of(*row));
            if (found == others.end()) continue;  // no other table has such rows
            ++one.rows;
            one.inside += is_inside(*row, bar_of(found->second)) ? 1 : 0;
        }
        all.rows += one.rows, all.inside += one.inside;
        if (one.rows > 0) result.push_back(one);
    }
    result.push_back(all);
    return result;
}

std::vector<Coverage> stated_coverage(const Comparisons& comparisons) {
    std::map<std::string, Coverage> devices;
    for (const Comparison& row : comparisons.rows) {
        if (!row.held_out) continue;
        Coverage& one = devices[row.device];
        one.of = row.device;
        ++one.rows;
        one.inside += is_inside(row, row.prediction.error) ? 1 : 0;
    }
    std::vector<Coverage> result;
    for (const auto& [device, one] : devices) result.push_back(one);
    return result;
}

}  // namespace tessera::measure
