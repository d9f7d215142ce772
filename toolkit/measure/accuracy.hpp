// SPDX-License-Identifier: Apache-2.0
//
// Compares Records with the model's predictions.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"
#include "model/error_bar.hpp"
#include "model/predict.hpp"

namespace tessera::measure {

using model::is_short;
using model::kind_of;

/// Returns the Problem that a Record is about; "causal" alone is bottom-right. Throws Error(bad_data) for an unknown
/// dtype, mask or feature, or for a ragged Record without the lengths of its sequences.
Problem problem_of(const Record& record);

/// True if the Record can come from a machine of this kind: its kernel has no other backend.
bool is_of_kind(const Record& record, model::MachineKind kind);

/// True if the Record is of a ragged backward of tessera whose grid had blocks for keys that sequences lack: those
/// before the list of key blocks.
bool had_empty_blocks(const Record& record);

/// True if the Record is of a forward that writes the residual of O, as training has it.
bool writes_residual(const Record& record);

/// Returns (queries, keys) of each sequence of a ragged Record; empty for any other Record.
std::vector<std::pair<std::int64_t, std::int64_t>> sequences_of(const Record& record);

/// A Record beside its prediction.
struct Comparison {
    Record record;
    std::string kernels;  ///< library and schedule: "flash-attention fa3"; "tessera decode" of cuda.decode.forward
    std::string kernel;   ///< of tessera's on a GPU; empty for others
    double predicted_ms = 0;
    model::Prediction prediction{};
    bool held_out = false;  ///< no constant was fitted on this row
    bool blind = false;     ///< the model was also built before anybody had seen such rows
    std::string device;     ///< the Record's device, with a note if the host was calibrated
    std::string kind;       ///< kind of problem: kind_of()
    double error() const { return predicted_ms / record.ms - 1; }
};

/// Describes the error bar of a prediction: its kind and the error of that kind. It also says whether the device, or a
/// CPU's kernels of that kind, were ever measured.
std::string error_bar_text(const Problem& problem, const model::Prediction& prediction, const model::Machine& machine);

/// Predictions for the Records whose kernel and device the model knows; the others are counted by reason.
struct Comparisons {
    std::vector<Comparison> rows;
    std::map<std::string, int> left_out;
};

/// Compares Records with predictions on `machine`. If it is null, the machine is read from the file beside the Records
/// that has machine.json instead of jsonl in its name, written by `tessera calibrate`. Otherwise the Record's device
/// name decides.
Comparisons compare(std::span<const Record> records, const model::Machine* machine = nullptr);

/// Errors of a group of comparisons.
struct Accuracy {
    std::string device;
    std::string kernels;
    std::string pass;
    int rows = 0;
    double median = 0;  ///< median absolute relative error
    double mean = 0;
    double within = 0;  ///< fraction of the rows that are off by 15 % at most
    double worst = 0;
    const Comparison* worst_row = nullptr;
};

/// Returns one entry for each (device, pass, kind) of the held-out rows, or of the blind rows with `blind`. The kind
/// stands in `kernels`; one more entry with empty `kernels` covers a device.
std::vector<Accuracy> summarise_held_out(const Comparisons& comparisons, bool blind = false);

/// Returns one entry for each (device, kernels, pass), and one more with empty `kernels` for all rows of a device.
std::vector<Accuracy> summarise(const Comparisons& comparisons);

}  // namespace tessera::measure
