// SPDX-License-Identifier: Apache-2.0
//
// Draws speed by length for a README: a panel for each kind of call, a line for each library.
#pragma once

#include <string>
#include <vector>

#include "plot/figure.hpp"
#include "report/rows.hpp"

namespace tessera::report {

/// The panels and lines of a chart. A kind of call is described by parts: "forward", "bf16", "head_dim 128", "causal"
/// or "full mask", "16 heads", "16 threads".
struct ChartOptions {
    std::string title{};
    std::string note{};                            ///< first line of the footer; empty: none
    std::vector<std::vector<std::string>> only{};  ///< a panel has one part of each list
    std::vector<std::string> without{};            ///< a panel has none of these parts
    std::vector<std::string> lines{};              ///< names in the order of the legend; empty: all
    std::size_t columns = 3;                       ///< panels fill a column before the next one begins
};

/// Draws the chart of one device: the one that has all lines and the most panels. All panels share one scale. The
/// subtitle names their common parts, the footer the commit or version and the date behind each line. Throws
/// Error(invalid_argument) naming "--line" or "--only" if nothing is left to draw.
plot::Panels chart(const Sorted& sorted, const ChartOptions& options);

}  // namespace tessera::report
