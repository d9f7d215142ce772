// SPDX-License-Identifier: Apache-2.0
//
// Further questions of `tessera roofline`: several machines (--compare), a whole model (--model), and several GPUs
// (--gpus).
#pragma once

#include <string>
#include <vector>

#include "plot/figure.hpp"
#include "roofline_options.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The machines of --compare, two or more of one kind.
std::vector<model::Machine> machines_to_compare(const RooflineOptions& options);

/// Prints a table of machines for each problem, each with its fastest schedule.
void show_comparison(const RooflineOptions& options, const Session& session);

/// Prints attention in the model of --model: prefill, training step and decode, on --device or each of --compare.
void show_model(const RooflineOptions& options, const Session& session);

/// Prints one sequence on each number of GPUs of --gpus.
void show_gpus(const RooflineOptions& options, const Session& session);

/// Writes the figure to --svg and --png, whichever is given.
void draw_files(const RooflineOptions& options, const plot::Figure& figure);

/// The larger error bar of the passes.
double error_of(const measure::SweepCell& cell);
/// GB/s of device memory.
double gigabytes_per_second(const measure::SweepCell& cell);
/// "650 TFLOP/s", or "3900 GB/s" if memory bounds the call.
std::string rate_text(const measure::SweepCell& cell);
/// Adds "fa3 of flash-attention" if it is not there.
void add_kernel(std::vector<std::string>& kernels, const measure::SweepCell& cell);
/// "+-14 %".
std::string error_percent_text(const measure::SweepCell& cell);

}  // namespace tessera::cli
