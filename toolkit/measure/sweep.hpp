// SPDX-License-Identifier: Apache-2.0
//
// Predictions over lengths and schedules, as `tessera roofline` shows them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/baseline.hpp"
#include "model/predict.hpp"
#include "plot/figure.hpp"

namespace tessera::measure {

/// One schedule at one length.
struct SweepCell {
    Schedule schedule{};
    std::vector<model::Prediction> passes;  ///< one for each requested pass; empty if refused
    std::string refusal;
    bool fits = true;  ///< tensors and workspace fit in the machine's memory

    bool known() const { return !passes.empty(); }
    double ms() const;
    double tflops() const;
    /// Returns the pass that takes longest; its bound stands for the whole.
    const model::Prediction& longest() const;
};

/// The baseline of a win, at one length.
struct SweepBaseline {
    model::Baseline kind{};
    SweepCell cell;  ///< its passes, or the reason why there are none
};

struct SweepRow {
    Problem problem;
    std::vector<SweepCell> cells;  ///< one for each schedule, in the requested order
    SweepBaseline baseline;

    /// Returns the fastest schedule that fits, or null if none is known.
    const SweepCell* best() const;
    const SweepCell* of(Schedule schedule) const;
    /// Returns the time of the baseline over that of `cell`; 0 if there is none (no_win()).
    double win(const SweepCell* cell) const;
    /// The error bar of a win: both predictions may be off.
    double win_error(const SweepCell& cell) const;
    /// The reason why `cell` has no win, or nothing: the baseline is not known or does not fit, or a cost is missing on
    /// one side.
    std::optional<std::string> no_win(const SweepCell& cell) const;
    /// The part of no_win() that says which cost is missing.
    std::optional<std::string> missing_cost(const SweepCell& cell) const;
};

/// The question that a sweep answers.
struct SweepQuestion {
    const model::Machine& machine;
    std::vector<Schedule> schedules;
    std::vector<Pass> passes;
    model::PredictOptions options{};  ///< `by` "published": the authors' kernels of fa2 and fa3 on GPUs, else tessera's
    /// The baseline of the wins; nothing: what PyTorch runs without FlashAttention (model::without_flash).
    std::optional<model::Baseline> baseline = model::Baseline::standard;
};

SweepRow sweep_one(const Problem& problem, const SweepQuestion& question);

/// Returns the ranges of lengths at which a schedule is faster than standard attention, such as {1, 812}, while
/// standard fits. An `end` of 0 means no end. Nothing: their times cannot be compared, because one leaves out a cost.
std::optional<std::vector<Range>> faster_than_standard(const Problem& problem, Schedule schedule,
                                                       const SweepQuestion& question);

/// Returns the speedup of a model whose attention takes a `fraction` of the time and becomes `speedup` times as fast:
/// 1 / (1 - fraction + fraction / speedup) (Amdahl 1967).
double amdahl_speedup(double fraction, double speedup);

/// Returns the peak TFLOP/s of the MMA instruction that the predicted kernel uses, which its share of the tensor roof
/// refers to. On Hopper and Blackwell, mma.sync is slower than the native instruction.
double mma_peak_tflops(const model::Machine& machine, const Problem& problem, const model::Prediction& prediction);

/// Plots FLOP per byte of DRAM against TFLOP/s, log-log: the machine's roofs, and one line through its lengths per
/// schedule. `with_baseline` adds a line of what the wins are counted from.
plot::Figure roofline_figure(const model::Machine& machine, std::span<const SweepRow> rows, bool with_baseline = false);

/// True if all rows are of few queries on longer keys, whose FLOP per byte do not change with the length.
bool is_decode(std::span<const SweepRow> rows);

/// Plots the rate at which such calls read memory over the keys, beside the rates that the memory reaches.
plot::Figure decode_figure(const model::Machine& machine, std::span<const SweepRow> rows);

}  // namespace tessera::measure
