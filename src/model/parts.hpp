// SPDX-License-Identifier: Apache-2.0
//
// What predictions for GPUs and CPUs share.
#pragma once

#include <fmt/format.h>

#include "model/predict.hpp"

namespace tessera::model {

/// What is to be predicted, everything chosen.
struct Question {
    const Problem& problem;
    Schedule schedule;
    Pass pass;
    const Machine& machine;
    const PredictOptions& options;
};

/// The units of work of a kernel: tiles of queries (backward: of keys) of all heads, each with its inner tiles.
struct Units {
    std::int64_t count = 0;
    std::int64_t tiles = 0;     ///< inner tiles of all
    std::int64_t cut = 0;       ///< those of them that a mask or an end cuts
    std::int64_t longest = 0;   ///< inner tiles of the unit that has most
    std::int64_t shortest = 0;  ///< of the one that has least
};
/// `ends`: a tile that reaches over the last key (backward: or query) counts as cut.
Units units_of(const schedule::Workload& workload, bool ends = true);

/// The workload when `at_once` units run at a time and all that is asked for again stays in the machine's L2.
schedule::Workload workload_of(const Question& question, const Tile& tile, std::int64_t at_once);

/// Its cost. Of what is more than the L2 holds a part stays, the less the more it is: bytes grow smoothly with the
/// length.
schedule::Cost cost_of(const Question& question, const schedule::Workload& workload);

/// Adds a bias to what is moved and held: fp32, [heads_q, len_q, len_kv], as if the sequences each had their own
/// but in memory, where they share it. Its work in the kernel is not modelled.
void count_bias(const Question& question, Prediction& prediction);

/// Collects a prediction: parts that add up, roofs, and the worksheet.
class Account {
 public:
    Account(Prediction& prediction, bool worksheet) : prediction_(prediction), worksheet_(worksheet) {}

    template <class... Args>
    void note(const char* what, fmt::format_string<Args...> formula, Args&&... args) {
        if (worksheet_) prediction_.worksheet.push_back({what, fmt::format(formula, std::forward<Args>(args)...)});
    }
    /// A part and the calculation that gives it: "{formula} = {ms} ms". Units beside numbers mean what they say: clk /
    /// GHz is ns, B / (GB/s) is ns.
    template <class... Args>
    void part(const char* name, double ms, fmt::format_string<Args...> formula, Args&&... args) {
        if (!(ms > 0)) return;
        prediction_.parts.push_back({name, ms});
        if (!worksheet_) return;
        prediction_.worksheet.push_back(
            {name, fmt::format("{} = {:.4g} ms", fmt::format(formula, std::forward<Args>(args)...), ms)});
    }
    /// The time is not less than this: what is missing becomes a part.
    void at_least(const char* name, double ms);
    void roof(std::string name, double ms) { prediction_.roofs.push_back({std::move(name), ms, 0}); }

    /// Sum of the parts, raised to the highest roof; shares, bound, TFLOP/s; the last line of the worksheet.
    void close();

 private:
    Prediction& prediction_;
    bool worksheet_;
};

/// Is the time of drawing dropout's mask in the prediction?
bool gpu_knows_dropout(const Question& question);
bool cpu_knows_dropout(const Question& question);

void predict_gpu(const Question& question, Prediction& prediction);
void predict_cpu(const Question& question, Prediction& prediction);

}  // namespace tessera::model
