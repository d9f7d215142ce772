// SPDX-License-Identifier: Apache-2.0
//
// How `tessera roofline` shows predictions, as text and as JSON.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "measure/accuracy.hpp"
#include "measure/sweep.hpp"
#include "session.hpp"

namespace tessera::cli {

/// "64 to 512", "2048 x 4096": the lengths of the rows from `first` to `last`.
std::string rows_text(const measure::SweepRow& first, const measure::SweepRow& last);

/// What stands above every table: device, problem, whose kernels.
std::string heading_text(const model::Machine& machine, std::span<const measure::SweepRow> rows, int width);

/// One line for each length: times, the best schedule's win and bound; `share`: and the whole model's win.
std::string lengths_text(std::span<const measure::SweepRow> rows, std::optional<double> share, int width);

/// One problem: a line for each schedule with its roofs, and where the time goes.
std::string schedules_text(const measure::SweepRow& row, const model::Machine& machine, std::optional<double> share,
                           int width);

/// The numbered calculation of each known prediction; `of_many`: with the row's length in its title.
std::string worksheet_text(const measure::SweepRow& row, const model::Machine& machine, bool of_many, int width);

/// Where each schedule is faster than standard, and how long a sequence each can have.
std::string limits_text(const measure::SweepRow& row, const measure::SweepQuestion& question, int width);

std::string accuracy_text(const measure::Comparisons& comparisons, int width);

Json json_of(const model::Prediction& prediction);
/// `share` of attention in a model: with the win of the whole model.
Json json_of(const measure::SweepRow& row, std::optional<double> share);
Json json_of(const measure::Comparisons& comparisons);

}  // namespace tessera::cli
