// SPDX-License-Identifier: Apache-2.0
//
// Formats the predictions of `tessera roofline`, as text and as JSON.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "measure/accuracy.hpp"
#include "measure/sweep.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The lengths of the rows from `first` to `last`: "64 to 512", "2048 x 4096".
std::string rows_text(const measure::SweepRow& first, const measure::SweepRow& last);

/// The heading of every table: the device, the problem, and the author of the kernels.
std::string heading_text(const model::Machine& machine, std::span<const measure::SweepRow> rows, int width);

/// One line per length: times, speedup and bound of the best schedule; with `share`, the whole model's speedup too.
std::string lengths_text(std::span<const measure::SweepRow> rows, std::optional<double> share, int width);

/// One problem: a line for each schedule with its roofs, and where the time goes.
std::string schedules_text(const measure::SweepRow& row, const model::Machine& machine, std::optional<double> share,
                           int width);

/// The numbered calculation of each known prediction; with `of_many`, the title gives the row's length.
std::string worksheet_text(const measure::SweepRow& row, const model::Machine& machine, bool of_many, int width);

/// The lengths at which each schedule is faster than standard, and the longest sequence that each can compute.
std::string limits_text(const measure::SweepRow& row, const measure::SweepQuestion& question, int width);

std::string accuracy_text(const measure::Comparisons& comparisons, int width);

Json json_of(const model::Prediction& prediction);
/// With the `share` of attention in a model, the JSON gives the whole model's speedup too.
Json json_of(const measure::SweepRow& row, std::optional<double> share);
Json json_of(const measure::Comparisons& comparisons);

}  // namespace tessera::cli
