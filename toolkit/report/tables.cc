// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "report/figures.hpp"
#include "report/report.hpp"

namespace tessera::report {
namespace {

bool any_prediction(const DeviceRows& device) {
    return std::any_of(device.groups.begin(), device.groups.end(), [](const Group& group) {
        return std::any_of(group.rows.begin(), group.rows.end(),
                           [](const Row& row) { return row.prediction.has_value(); });
    });
}

/// Returns a cell of a Markdown table with escaped bars, which would end it.
std::string cell(const std::string& text) {
    std::string result;
    for (const char c : text) {
        if (c == '|') result += '\\';
        result += c == '\n' ? ' ' : c;
    }
    return result;
}

std::string line(const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& c : cells) text.append(" ").append(cell(c)).append(" |");
    return text + "\n";
}

}  // namespace

std::vector<std::string> table_columns(const DeviceRows& device) {
    std::vector<std::string> columns = {"kernels", "mask", "head_dim", "heads",  "batch",
                                        "length",  "with", "ms",       "spread", unit_of(device).name};
    if (any_prediction(device)) columns.insert(columns.end(), {"predicted ms", "off by", "bound"});
    return columns;
}

std::vector<std::string> table_cells(const DeviceRows& device, const Group& group, const Row& row) {
    const measure::Record& r = row.record;
    const std::string length =
        r.len_q == r.len_kv ? fmt::format("{}", r.len_q) : fmt::format("{} x {}", r.len_q, r.len_kv);
    std::vector<std::string> cells = {row.label,
                                      group.mask,
                                      group.head_dim,
                                      group.heads,
                                      fmt::format("{}", r.batch),
                                      length,
                                      group.dtype + (group.others.empty() ? "" : ", " + group.others),
                                      fmt::format("{:.4g}", r.ms),
                                      fmt::format("{:.2g}", r.ms_spread),
                                      fmt::format("{:.4g}", r.tflops * unit_of(device).per_tflops)};
    if (any_prediction(device)) {
        cells.push_back(row.prediction ? fmt::format("{:.4g}", row.prediction->ms) : "");
        cells.push_back(row.prediction ? fmt::format("{:+.0f} %", 100 * row.off_by()) : "");
        cells.push_back(row.prediction ? row.prediction->bound : "");
    }
    return cells;
}

Provenance provenance(const DeviceRows& device) {
    std::set<std::string> days, commits, versions;
    for (const Group& group : device.groups) {
        for (const Row& row : group.rows) {
            days.insert(row.record.date.substr(0, 10));
            if (!row.record.commit.empty()) commits.insert(row.record.commit);
            for (const auto& [name, version] : row.record.versions) versions.insert(name + " " + version);
        }
    }
    const std::string when = days.size() == 1 ? *days.begin() : *days.begin() + " to " + *days.rbegin();
    std::string text;
    if (!commits.empty()) text = fmt::format("commit{} {}", commits.size() == 1 ? "" : "s", fmt::join(commits, ", "));
    if (!versions.empty()) text += fmt::format("{}{}", text.empty() ? "" : "; ", fmt::join(versions, ", "));
    const std::string replaced =
        device.replaced == 0 ? ""
                             : fmt::format(", the newest of each case ({} older ones are left out)", device.replaced);
    return {fmt::format("{} measurements, {}{}", device.count(), when, replaced), text};
}

/// Returns text as a line of Markdown, in which markup and HTML are escaped.
static std::string plain(const std::string& text) {
    std::string result;
    for (const char c : text) {
        if (std::string_view("\\`*_{}[]<>#|&").find(c) != std::string_view::npos) result += '\\';
        result += c == '\n' ? ' ' : c;
    }
    return result;
}

std::string markdown(const Sorted& sorted, const std::string& title) {
    std::string text = fmt::format("{}\n# {}\n", kMarkdownMark, plain(title));
    for (const DeviceRows& device : sorted.devices) {
        const Provenance from = provenance(device);
        text += fmt::format("\n## {}\n\n{}; {}.\n", plain(device.name), from.when, plain(from.versions));
        for (const char* pass : {"forward", "backward"}) {
            std::string rows;
            for (const Group& group : device.groups) {
                if (group.pass != pass) continue;
                for (const Row& row : group.rows) rows += line(table_cells(device, group, row));
            }
            if (rows.empty()) continue;
            const auto columns = table_columns(device);
            text += fmt::format("\n### {}\n\n", pass);
            if (const auto accuracy = accuracy_text(predicted_rows(device, pass)); !accuracy.empty())
                text += fmt::format("{}.\n\n", accuracy);
            text += line(columns);
            text += "|";
            for (std::size_t c = 0; c < columns.size(); ++c) text += c >= 7 && columns[c] != "bound" ? "---:|" : "---|";
            text.append("\n").append(rows);
        }
    }
    return text;
}

}  // namespace tessera::report
