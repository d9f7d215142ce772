// SPDX-License-Identifier: Apache-2.0
//
// plan_on() is plan() for a machine that need not be there. The rows that refuse a Problem at run time are asked with
// that machine's numbers, and the cost model predicts the time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/predict.hpp"
#include "tessera/plan.hpp"

namespace tessera {

/// A kernel of tessera's on that machine.
struct Candidate {
    std::string kernel;  ///< "cuda.fa3.forward"
    Schedule schedule{};
    std::string reason{};                          ///< why it does not run the Problem; empty: it is the one that does
    bool capable = false;                          ///< it could, but another one comes first or was asked for
    Tile tile{};                                   ///< the tile that a capable one would use
    std::int64_t workspace_bytes = 0;              ///< likewise; on a GPU as the schedule counts it
    std::optional<model::Prediction> predicted{};  ///< nothing when it is not capable, or the model does not know it
};

struct PlanOn {
    std::vector<Candidate> kernels;  ///< in order of preference
    int threads = 0;                 ///< threads on a CPU
    /// The one that runs; null when none does.
    const Candidate* chosen() const;
};

/// Throws Error(invalid_argument) for what no plan can have, wherever it runs: a tile of 0, too many threads.
void validate_plan_options(const PlanOptions& options);

/// Plans for `machine`, which decides the backend and the device: options.backend and options.device are ignored.
/// `sequences` are those of a ragged batch, as in model::PredictOptions. Throws Error(invalid_argument) as plan() does.
PlanOn plan_on(const model::Machine& machine, const Problem& problem, const PlanOptions& options = {},
               const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences = {});

}  // namespace tessera
