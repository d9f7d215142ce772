// SPDX-License-Identifier: Apache-2.0
//
// Records as a page to read, and as tables for a README.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "report/rows.hpp"

namespace tessera::report {

/// What a page and tables hold near their beginning: who made them.
inline constexpr std::string_view kHtmlMark = "<meta name=\"generator\" content=\"tessera report\">";
inline constexpr std::string_view kMarkdownMark = "<!-- made by tessera report -->";

/// One self-contained HTML page: plots as SVG, tables, styles within; no script, nothing loaded from anywhere. Light or
/// dark as the reader's system is set, one column on a phone, several on a wide screen.
std::string html_page(const Sorted& sorted, const std::string& title);

/// How many plots html_page() draws.
std::size_t plots_of(const DeviceRows& device);

/// Tables of all measurements with their predictions, one for each device and pass.
std::string markdown(const Sorted& sorted, const std::string& title);

/// What a device's measurements come to, a sentence for each pass: who is the fastest how often, how tessera's best
/// kernel stands beside the best of the others, and how many figures are noisy.
std::vector<std::string> verdicts(const DeviceRows& device);

/// The columns of the tables, and a row's cells.
std::vector<std::string> table_columns(const DeviceRows& device);
std::vector<std::string> table_cells(const DeviceRows& device, const Group& group, const Row& row);

/// Where a device's measurements come from.
struct Provenance {
    std::string when;      ///< "138 measurements, 2026-03-01 to 2026-03-02"
    std::string versions;  ///< "commits a1b2c3, d4e5f6; cudnn 9.19.0, tessera 0.1.0"
};
Provenance provenance(const DeviceRows& device);

}  // namespace tessera::report
