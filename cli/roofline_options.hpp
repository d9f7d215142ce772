// SPDX-License-Identifier: Apache-2.0
//
// The options of `tessera roofline`, and the question that they ask.
#pragma once

#include <string>
#include <vector>

#include "measure/sweep.hpp"
#include "options.hpp"

namespace tessera::cli {

struct RooflineOptions {
    ShapeOptions shape;
    ScoreOptions scores;
    std::string device = "h200";
    std::string schedules = "all";
    PassOptions pass;
    std::string by = "published";
    std::string baseline = "pytorch";
    std::string threads;
    std::string tokens;
    std::string svg;
    std::string png;
    std::string amdahl;
    std::string tile;
    std::string compare;
    std::string model;
    std::string gpus;
    std::string link = "nvlink";
    std::string rows_of_gpu;
    bool nccl = false;
    bool timeline = false;
    bool worksheet = false;
    bool accuracy = false;
    bool dtype_given = false;
    bool device_given = false;
    bool by_given = false;
    bool baseline_given = false;
    std::vector<std::string> records;

    void declare(CLI::App& command);

    std::vector<Schedule> schedule_list() const;
    std::vector<Pass> passes() const;
    model::PredictOptions predict_options(const model::Machine& machine) const;
    /// Returns the baseline of a win; nothing: what PyTorch runs without FlashAttention.
    std::optional<model::Baseline> baseline_kind() const;
    /// Returns the tile of --tile, if given.
    std::optional<Tile> own_tile() const;
    /// Returns the fraction of attention, if --amdahl is given.
    std::optional<double> attention_fraction() const;
    /// Returns the lengths of --len with --model, each at least 1.
    std::vector<std::int64_t> model_lengths() const;
    /// Returns the rows of a GPU of --rows.
    std::vector<std::int64_t> rows_list() const;
    /// Returns every problem, each with a query and a sequence, with lengths in the given order; "512:65536" doubles.
    /// The default dtype is bf16 on GPUs and fp32 on CPUs.
    std::vector<Problem> problems(const model::Machine& machine) const;
};

}  // namespace tessera::cli
