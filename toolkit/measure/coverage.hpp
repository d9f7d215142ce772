// SPDX-License-Identifier: Apache-2.0
//
// How many measured times lie inside of the error bars of predictions, on rows that no bar was made from.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/accuracy.hpp"

namespace tessera::measure {

/// Is the measured time of a row within this error bar of its prediction?
bool is_inside(const Comparison& row, double error);

/// The bar that nine of ten of n rows stay within, with the correction of a small sample: the ceil(0.9 (n + 1))-th
/// smallest error.
double bar_of(std::span<const Comparison* const> rows);

/// A group of rows, and those of them inside of bars that other rows made.
struct Coverage {
    std::string of;
    int rows = 0;
    int inside = 0;
};

/// The bars of cards that nobody measured, judged table by table: each published table (device and Record::versions,
/// "source") of a card is predicted by the bars that all other tables make, by pass and by whether queries and keys are
/// equally many. Baselines are left out. One entry for each table, and one with an empty name for all.
std::vector<Coverage> leave_one_table_out(const Comparisons& comparisons);

/// The rows of each device that no constant was fitted on, inside of the bars that predictions state.
std::vector<Coverage> stated_coverage(const Comparisons& comparisons);

}  // namespace tessera::measure
