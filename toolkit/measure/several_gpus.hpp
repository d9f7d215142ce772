// SPDX-License-Identifier: Apache-2.0
//
// One sequence on several GPUs, over lengths and numbers of GPUs, as `tessera roofline --gpus` shows it.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plot/figure.hpp"
#include "tessera/predict_context_parallel.hpp"

namespace tessera::measure {

/// The question that each row of the table answers.
struct GpusQuestion {
    const Machine& machine;
    Schedule schedule{};
    std::vector<Pass> passes;
    Link link;
    int steps = 0;                                                   ///< 0: the library's own number
    std::vector<std::pair<std::int64_t, std::int64_t>> documents{};  ///< of a ragged Problem: queries and keys of each
    bool copies = true;                                              ///< GPUs of one host copy from each other
};

/// One length on one number of GPUs.
struct GpusRow {
    Problem problem;
    int gpus = 1;
    std::vector<ContextParallelPrediction> passes;  ///< one for each requested pass

    /// Rows of the whole sequence.
    std::int64_t rows() const { return problem.ragged ? problem.total_q : problem.len_q; }
    double ms() const;
    double one_gpu_ms() const;
    /// The time of one GPU over that of this row.
    double speed_up() const { return one_gpu_ms() / ms(); }
    /// The part of so many GPUs' speed that is reached.
    double share() const { return speed_up() / gpus; }
    double kernel_ms() const;
    /// By a ring; 0: no ring is predicted for this mask.
    double ring_ms() const;
    double error() const;  ///< the larger one of the passes
    bool measured() const;
    bool fits_one_gpu() const;
    std::int64_t memory() const;  ///< the larger one of the passes
    std::int64_t bytes_received() const;
};

GpusRow row_on_gpus(const Problem& problem, int gpus, const GpusQuestion& question);

/// From which length on several GPUs are worth it, among lengths that double. 0: at none of them.
struct GpusLimits {
    int gpus = 1;
    std::int64_t shortest = 0, longest = 0;  ///< the lengths that were asked
    std::int64_t faster_from = 0;            ///< the time is under that of one GPU from here on
    std::int64_t most_from = 0;              ///< the share is 0.9 or more from here on
    std::int64_t ring_from = 0;              ///< a ring is faster from here on
    std::int64_t ring_to = 0;                ///< up to here
};
GpusLimits limits_on_gpus(const Problem& problem, int gpus, const GpusQuestion& question);

/// Plots the share of one GPU's speed over the length, with a line for each number of GPUs: dashed where the link was
/// not measured on so many.
plot::Figure gpus_figure(const GpusQuestion& question, std::span<const GpusRow> rows);

}  // namespace tessera::measure
