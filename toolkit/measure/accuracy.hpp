// SPDX-License-Identifier: Apache-2.0
//
// How far predictions are from measurements: Records against the model.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"
#include "model/predict.hpp"

namespace tessera::measure {

/// The Problem that a Record is about. Throws Error(bad_data) for a dtype, a mask or a feature that it does not know;
/// "causal" alone is bottom-right; or for a ragged one that does not tell the lengths of its sequences.
Problem problem_of(const Record& record);

/// Can it have been measured on a machine of this kind: is its kernel of no other backend?
bool is_of_kind(const Record& record, model::MachineKind kind);

/// (queries, keys) of each sequence of a ragged Record; of another one nothing.
std::vector<std::pair<std::int64_t, std::int64_t>> sequences_of(const Record& record);

/// A Record beside its prediction.
struct Comparison {
    Record record;
    std::string kernels;  ///< whose, and which schedule: "flash-attention fa3"
    double predicted_ms = 0;
    model::Prediction prediction{};
    bool held_out = false;  ///< no constant was fitted on this row
    bool blind = false;     ///< nor had anybody seen such rows when the model came to be what it is
    std::string device;     ///< the Record's; of a host that was calibrated, with those words
    std::string kind;       ///< of problem: kind_of()
    double error() const { return predicted_ms / record.ms - 1; }
};

/// What sort of problem it is, the first of these that fits: "ragged", "decode" (up to 16 queries), "window", "cross
/// lengths", "grouped heads", "few heads" (tiles of 128 queries for less than half of 132 multiprocessors), "head_dim"
/// (neither 64, 128 nor 256), "prefill".
std::string kind_of(const Problem& problem);

/// How far nine of ten held-out rows of fa2, fa3 and cuDNN of this kind were off at most, on an H200; tests hold it
/// against the Records.
double expected_error(const std::string& kind, Pass pass, bool is_short);

/// Up to 2e10 FLOP: what a call takes whatever its size counts there, and such calls have error bars of their own.
bool is_short(const model::Prediction& prediction);

/// The same of standard and fa1, of all kinds together: few of each were measured.
double expected_error_of_plain(Schedule schedule, Pass pass, bool is_short);

/// The error bar of a prediction in words: its kind, how far such were off, and whether the device, or a CPU's kernels
/// of that kind, were ever measured.
std::string error_bar_text(const Problem& problem, const model::Prediction& prediction, const model::Machine& machine);

/// Predictions for the Records that the model knows kernel and device of; the others are counted by reason.
struct Comparisons {
    std::vector<Comparison> rows;
    std::map<std::string, int> left_out;
};

/// `machine`: of the Records' device. Null: the file beside theirs that has machine.json instead of jsonl in its name,
/// which `tessera calibrate` wrote there; else the one that the Record's device is known as.
Comparisons compare(std::span<const Record> records, const model::Machine* machine = nullptr);

/// Errors of a group of comparisons.
struct Accuracy {
    std::string device;
    std::string kernels;
    std::string pass;
    int rows = 0;
    double median = 0;  ///< of the absolute relative error
    double mean = 0;
    double within = 0;  ///< share of the rows that are off by 15 % at most
    double worst = 0;
    const Comparison* worst_row = nullptr;
};

/// Of the rows that are held out (`blind`: of those that nobody had seen), one entry for each (device, pass, kind), the
/// kind in `kernels`, and one more with empty `kernels` for all of a device.
std::vector<Accuracy> summarise_held_out(const Comparisons& comparisons, bool blind = false);

/// Of all rows, one entry for each (device, kernels, pass), and one more with empty `kernels` for all rows of a device.
std::vector<Accuracy> summarise(const Comparisons& comparisons);

}  // namespace tessera::measure
