// SPDX-License-Identifier: Apache-2.0
//
// predict() says how long a schedule takes on a machine, and why, without running anything. docs/model.md explains the
// formulas, and tests/consumer/project/from_cpp.cc is an example.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/cost.hpp"
#include "tessera/kernel.hpp"
#include "tessera/machine.hpp"
#include "tessera/problem.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// The options of a prediction.
struct PredictOptions {
    /// The library of the kernels: "tessera", "flash-attention" (its fa2 and fa3), "cudnn" (as fa3), or "" for any
    /// library that constants were fitted for, tessera first.
    std::string by{};
    std::optional<Tile> tile{};  ///< default: the kernel's own
    int threads = 0;             ///< CPU: 0 for all cores of the machine
    std::vector<std::pair<std::int64_t, std::int64_t>>
        sequences{};  ///< (queries, keys) of each sequence of a ragged batch or a cache; empty: of the upper bounds
    bool worksheet = false;  ///< fill Prediction::worksheet
    /// A GPU's kernel of tessera, such as "cuda.decode.forward"; "": of the schedule's kernels, the one that plan()
    /// prefers for the Problem and the tile.
    std::string kernel{};
    /// Forward of tessera on a GPU, in 16 bits: the call writes the residual of O (ForwardArgs::o_residual), as
    /// training does. A forward that does not write it is faster.
    bool o_residual = false;
};

/// A roof: the time that one unit would need for the whole problem at the rated clock if nothing else took time.
struct Roof {
    std::string name;  ///< "tensor", "SFU (exp)", "shared memory", "L2", "DRAM", "launch"; CPU: "FMA", "exp", ...
    double ms = 0;
    double percent = 0;  ///< `ms` in percent of the predicted time
};

/// A part of the predicted time. The parts add up to the whole.
struct Part {
    std::string name;
    double ms = 0;
};

/// One line of a calculation that a person can redo.
struct WorksheetLine {
    std::string what;     ///< "steps of a tile of queries"
    std::string formula;  ///< "2048 / 128 = 16"
};

/// The time of one call and what it is made of. Times are in milliseconds, rates in TFLOP/s (10^12 per second).
struct Prediction {
    Schedule schedule{};
    Pass pass{};
    std::string by;  ///< the library of the kernel
    /// The Records that the constants were fitted to, or the calls that measured the machine's own kernels. Empty:
    /// none; the constants are those of a similar machine.
    std::string fitted_on;
    bool measured = false;  ///< CPU: fitted_on are calls of such kernels on this very machine (Machine::kernels)
    /// Features of the Problem whose time is left out: "softcap, dropout"; empty: none.
    std::string not_modelled;
    Tile tile{};
    double ms = 0;
    /// The error bar: nine of ten measured times of such calls lie between ms / (1 + error) and ms * (1 + error), by
    /// rows that no constant was fitted on (docs/model.md, section 6).
    double error = 0;
    double tflops = 0;     ///< visible pairs only
    double clock_ghz = 0;  ///< the clock that the power limit allows for this kernel
    std::string bound;     ///< the roof that is nearest, or "launch", "idle cores" when most of the time is that
    double percent_of_bound = 0;
    std::vector<Roof> roofs;
    std::vector<Part> parts;
    Cost cost;  ///< as counted for this machine's L2
    Footprint memory;
    double intensity = 0;  ///< FLOP per byte of DRAM
    std::vector<WorksheetLine> worksheet;
};

/// The reason why there is no prediction (a dtype that the machine lacks, fa3 without wgmma, no kernel of `by`), or
/// nothing when there is one.
std::optional<std::string> refusal(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                   const PredictOptions& options = {});

/// Predicts the time of one call of `schedule`'s kernel on `machine`. The Problem's shapes are those of the call: q
/// [batch, len_q, heads_q, head_dim], k [batch, len_kv, heads_kv, head_dim], v [batch, len_kv, heads_kv, head_dim_v];
/// nothing is allocated and nothing runs. docs/model.md says how far predictions of each kind were off. Throws
/// Error(unsupported) with refusal()'s reason, Error(invalid_argument) as Problem::validate(), or when counts of the
/// Problem pass 2^62.
Prediction predict(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                   const PredictOptions& options = {});

/// The largest len_kv, up to 2^32, whose tensors and workspace fit the machine's memory; 0 when none does. len_q grows
/// with it if both are equal in the Problem. The other sizes are the Problem's.
std::int64_t longest_that_fits(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine);

}  // namespace tessera
#pragma GCC visibility pop
