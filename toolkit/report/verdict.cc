// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "measure/statistics.hpp"
#include "report/report.hpp"

namespace tessera::report {
namespace {

/// The fastest kernel of tessera and the fastest of the others for one case.
struct Case {
    const Row* ours = nullptr;
    const Row* others = nullptr;
    const Row* best() const {
        if (ours == nullptr || others == nullptr) return ours != nullptr ? ours : others;
        return ours->record.ms <= others->record.ms ? ours : others;
    }
};

using Key = std::tuple<const Group*, std::int64_t, std::int64_t, std::int64_t>;

std::map<Key, Case> cases_of(const DeviceRows& device, const std::string& pass) {
    std::map<Key, Case> cases;
    for (const Group& group : device.groups) {
        if (group.pass != pass) continue;
        for (const Row& row : group.rows) {
            Case& c = cases[{&group, row.record.batch, row.record.len_q, row.record.len_kv}];
            const Row*& best = row.label.starts_with("tessera") ? c.ours : c.others;
            if (best == nullptr || row.record.ms < best->record.ms) best = &row;
        }
    }
    return cases;
}

/// True if more than one kernel was measured.
bool compared(const DeviceRows& device, const std::string& pass) {
    std::set<std::string> labels;
    for (const Group& group : device.groups) {
        if (group.pass != pass) continue;
        for (const Row& row : group.rows) labels.insert(row.label);
    }
    return labels.size() > 1;
}

std::string ratio_to_others(const std::map<Key, Case>& cases) {
    double sum = 0, least = INFINITY, most = 0;
    int both = 0;
    for (const auto& [key, c] : cases) {
        if (c.ours == nullptr || c.others == nullptr) continue;
        const double ratio = c.others->record.ms / c.ours->record.ms;
        sum += std::log(ratio), least = std::min(least, ratio), most = std::max(most, ratio);
        ++both;
    }
    if (both == 0) return "";
    return fmt::format(
        "; tessera's best kernel is {:.2f} times as fast as the best of the others ({:.2f} to {:.2f} in {} "
        "cases, geometric mean)",
        std::exp(sum / both), least, most, both);
}

}  // namespace

std::vector<std::string> verdicts(const DeviceRows& device) {
    std::vector<std::string> result;
    for (const char* pass : {"forward", "backward"}) {
        const auto cases = cases_of(device, pass);
        if (cases.empty()) continue;
        std::map<std::string, int> wins;
        for (const auto& [key, c] : cases) ++wins[c.best()->label];
        const auto first = std::max_element(wins.begin(), wins.end(),
                                            [](const auto& a, const auto& b) { return a.second < b.second; });
        int rows = 0, noisy = 0;
        for (const Group& group : device.groups) {
            for (const Row& row : group.rows) {
                if (group.pass != pass) continue;
                ++rows;
                noisy += measure::is_noisy(row.record.ms, row.record.ms_spread) ? 1 : 0;
            }
        }
        std::string text = compared(device, pass)
                               ? fmt::format("{}: {} is the fastest in {} of {} cases{}", pass, first->first,
                                             first->second, cases.size(), ratio_to_others(cases))
                               : fmt::format("{}: only {} was measured, {} cases", pass, first->first, cases.size());
        if (noisy > 0)
            text += fmt::format("; {} of {} measurements spread by more than {:.0f} % and have error bars", noisy, rows,
                                100 * measure::kNoisySpread);
        result.push_back(text + ".");
    }
    return result;
}

}  // namespace tessera::report
