// SPDX-License-Identifier: Apache-2.0
//
// Shows Records as an HTML page and as tables for a README.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "report/rows.hpp"

namespace tessera::report {

/// Marks near the beginning of a page or table that name its generator.
inline constexpr std::string_view kHtmlMark = "<meta name=\"generator\" content=\"tessera report\">";
inline constexpr std::string_view kMarkdownMark = "<!-- made by tessera report -->";

/// Returns one self-contained HTML page with plots as SVG, tables and styles; it has no script and loads nothing. It
/// follows the reader's light or dark setting, with one column on a phone and several on a wide screen.
std::string html_page(const Sorted& sorted, const std::string& title);

/// Number of plots that html_page() draws.
std::size_t plots_of(const DeviceRows& device);

/// Returns tables of all measurements with their predictions, one for each device and pass.
std::string markdown(const Sorted& sorted, const std::string& title);

/// Summarises a device's measurements, one sentence for each pass. It says how often each one is the fastest, how
/// tessera's best kernel compares with the best of the others, and how many measurements are noisy.
std::vector<std::string> verdicts(const DeviceRows& device);

/// Returns the columns of the tables, and a row's cells.
std::vector<std::string> table_columns(const DeviceRows& device);
std::vector<std::string> table_cells(const DeviceRows& device, const Group& group, const Row& row);

/// The origin of a device's measurements.
struct Provenance {
    std::string when;      ///< "138 measurements, 2026-03-01 to 2026-03-02"
    std::string versions;  ///< "commits a1b2c3, d4e5f6; cudnn 9.19.0, tessera 0.1.0"
};
Provenance provenance(const DeviceRows& device);

}  // namespace tessera::report
