// SPDX-License-Identifier: Apache-2.0
//
// Predictions over lengths and schedules: what `tessera roofline` shows.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/predict.hpp"
#include "plot/figure.hpp"

namespace tessera::measure {

/// One schedule at one length.
struct SweepCell {
    Schedule schedule{};
    std::vector<model::Prediction> passes;  ///< one for each pass asked for; empty when refused
    std::string refusal;
    bool fits = true;  ///< tensors and workspace, in the machine's memory

    bool known() const { return !passes.empty(); }
    double ms() const;
    double tflops() const;
    /// The pass that takes longest: its bound stands for the whole.
    const model::Prediction& longest() const;
};

struct SweepRow {
    Problem problem;
    std::vector<SweepCell> cells;  ///< one for each schedule, in the order asked for

    /// The fastest schedule that fits, or null when none is known.
    const SweepCell* best() const;
    const SweepCell* of(Schedule schedule) const;
    /// Time of standard attention over that of `cell`; 0 when one of them is not known, or standard does not fit.
    double win(const SweepCell* cell) const;
};

/// What a sweep asks.
struct SweepQuestion {
    const model::Machine& machine;
    std::vector<Schedule> schedules;
    std::vector<Pass> passes;
    model::PredictOptions options{};  ///< `by` "published": the authors' kernels of fa2 and fa3 on GPUs, else tessera's
};

SweepRow sweep_one(const Problem& problem, const SweepQuestion& question);

/// Lengths between which a schedule is faster than standard attention, while that fits: {1, 812} and so on; `end` 0:
/// without end.
std::vector<Range> faster_than_standard(const Problem& problem, Schedule schedule, const SweepQuestion& question);

/// `part` of a model's time is attention, and attention becomes `win` times as fast: so many times faster is the model
/// (Amdahl 1967): 1 / (1 - part + part / win).
double whole_win(double part, double win);

/// FLOP per byte of DRAM against TFLOP/s, log-log: the machine's roofs, and each schedule's way through the lengths.
plot::Figure roofline_figure(const model::Machine& machine, std::span<const SweepRow> rows);

}  // namespace tessera::measure
