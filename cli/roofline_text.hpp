// SPDX-License-Identifier: Apache-2.0
//
// Shows the predictions of `tessera roofline` as text and as JSON.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "measure/accuracy.hpp"
#include "measure/sweep.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Returns the lengths of the rows from `first` to `last`, such as "64 to 512" or "2048 x 4096".
std::string rows_text(const measure::SweepRow& first, const measure::SweepRow& last);

/// Returns the heading of every table: device, problem, library of the kernels.
std::string heading_text(const model::Machine& machine, std::span<const measure::SweepRow> rows, int width);

/// Returns one line for each length: times, and the best schedule's speed-up and bound. `fraction` is that of attention
/// in a model's time; it adds the speed-up of the model.
std::string lengths_text(std::span<const measure::SweepRow> rows, std::optional<double> fraction, int width);

/// Shows one problem: a line for each schedule with its roofs, and the split of its time.
std::string schedules_text(const measure::SweepRow& row, const model::Machine& machine, std::optional<double> fraction,
                           int width);

/// Returns the numbered calculation of each known prediction; `of_many` puts the row's length in its title.
std::string worksheet_text(const measure::SweepRow& row, const model::Machine& machine, bool of_many, int width);

/// Returns the lengths at which each schedule is faster than standard, and the longest sequence that each can have.
std::string limits_text(const measure::SweepRow& row, const measure::SweepQuestion& question, int width);

std::string accuracy_text(const measure::Comparisons& comparisons, int width);

Json json_of(const model::Prediction& prediction);
/// `fraction` is that of attention in a model's time; it adds the speed-up of the model.
Json json_of(const measure::SweepRow& row, std::optional<double> fraction);
Json json_of(const measure::Comparisons& comparisons);

}  // namespace tessera::cli
