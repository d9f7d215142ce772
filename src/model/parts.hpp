// SPDX-License-Identifier: Apache-2.0
//
// Functions and types common to predictions for GPUs and CPUs.
#pragma once

#include <fmt/format.h>

#include "model/predict.hpp"

namespace tessera::model {

/// The question of a prediction, with all choices made.
struct Question {
    Problem problem;  ///< without a cache: sequences have the keys that the cache holds of them
    Schedule schedule;
    Pass pass;
    const Machine& machine;
    PredictOptions options;
    bool cached = false;         ///< are the keys in a cache?
    std::int64_t page_size = 0;  ///< keys of a page of the cache; 0: slots, or no cache
    bool empty_blocks = false;   ///< does a ragged grid start blocks for keys that sequences lack?
};

/// The Question of predict(). On a GPU, options.kernel names the kernel of tessera that is meant.
Question question_of(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                     const PredictOptions& options);

/// The units of work of a kernel: tiles of queries (backward: of keys) of all heads, each with its inner tiles.
struct Units {
    std::int64_t count = 0;
    std::int64_t tiles = 0;     ///< inner tiles of all units
    std::int64_t cut = 0;       ///< partial inner tiles: a mask or the end of the keys cuts them
    std::int64_t longest = 0;   ///< inner tiles of the largest unit
    std::int64_t shortest = 0;  ///< inner tiles of the smallest unit
};
/// Counts the units of a workload. `ends`: a tile that extends beyond the last key (backward: or query) is partial.
Units units_of(const schedule::Workload& workload, bool ends = true);

/// The workload with `at_once` units at a time, if all data that is read again stays in the machine's L2.
schedule::Workload workload_of(const Question& question, const Tile& tile, std::int64_t at_once);

/// The cost of the workload. The L2 holds a part of data that exceeds its capacity; the part shrinks with the excess,
/// so that bytes grow smoothly with the length.
schedule::Cost cost_of(const Question& question, const schedule::Workload& workload);

/// Adds a bias to the traffic and the footprint: fp32, [heads_q, len_q, len_kv]. Each sequence reads it, but memory
/// holds it once. Its work in the kernel is not modelled.
void count_bias(const Question& question, Prediction& prediction);

/// Collects a prediction: parts that add up, roofs, and the worksheet.
class Account {
 public:
    Account(Prediction& prediction, bool worksheet) : prediction_(prediction), worksheet_(worksheet) {}

    template <class... Args>
    void note(const char* what, fmt::format_string<Args...> formula, Args&&... args) {
        if (worksheet_) prediction_.worksheet.push_back({what, fmt::format(formula, std::forward<Args>(args)...)});
    }
    /// Adds a part and its calculation: "{formula} = {ms} ms". Units beside numbers are literal: clk / GHz is ns, B /
    /// (GB/s) is ns.
    template <class... Args>
    void part(const char* name, double ms, fmt::format_string<Args...> formula, Args&&... args) {
        if (!(ms > 0)) return;
        prediction_.parts.push_back({name, ms});
        if (!worksheet_) return;
        prediction_.worksheet.push_back(
            {name, fmt::format("{} = {:.4g} ms", fmt::format(formula, std::forward<Args>(args)...), ms)});
    }
    /// Sets a lower bound of the time: the difference becomes a part.
    void at_least(const char* name, double ms);
    void roof(std::string name, double ms) { prediction_.roofs.push_back({std::move(name), ms, 0}); }

    /// Closes the prediction: the sum of the parts, raised to the highest roof; shares, bound, TFLOP/s; the last line
    /// of the worksheet.
    void close();

 private:
    Prediction& prediction_;
    bool worksheet_;
};

/// The features of a Problem whose cost is not modelled, such as "softcap, dropout"; empty: none.
std::string not_modelled(const Problem& problem, bool knows_dropout);

/// Does the prediction include the time of drawing dropout's mask?
bool gpu_knows_dropout(const Question& question);
bool cpu_knows_dropout(const Question& question);

void predict_gpu(const Question& question, Prediction& prediction);
void predict_cpu(const Question& question, Prediction& prediction);

}  // namespace tessera::model
