// SPDX-License-Identifier: Apache-2.0
//
// A trace: what a CPU kernel did with one tile of queries, step by step, in its own numbers. The kernel is run as
// always, with an observer that copies. Where the plan has no matrix unit, every value has the bits that forward() and
// backward() compute with. Where it has one, a call that nobody watches runs another kernel of the same schedule:
// what_ran() says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "walk/traffic.hpp"

namespace tessera::walk {

/// Whose tile of queries is followed.
struct Selection {
    std::int64_t batch = 0;
    std::int64_t head = 0;  ///< query head
    std::int64_t row = 0;   ///< any query of the tile
};

/// A row-major matrix.
struct Matrix {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::vector<float> values{};  // [rows, columns]

    bool empty() const { return values.empty(); }
    float at(std::int64_t row, std::int64_t column) const {
        return values[static_cast<std::size_t>(row * columns + column)];
    }
};

/// One step of the kernel, or a tile that the mask made it skip (coverage empty: no values). Values of other kinds of
/// steps are empty. Queries are those of the trace.
struct Step {
    TileStep step = TileStep::values;
    Coverage coverage = Coverage::full;
    Range keys;
    std::vector<float> m{};        // [queries]
    std::vector<float> l{};        // [queries]
    std::vector<float> rescale{};  // [queries]
    Matrix o{};                    // [queries, head_dim_v]
    Matrix s{};                    // [queries, keys]
    Matrix p{};                    // [queries, keys]
    Matrix ds{};                   // [queries, keys]
    Matrix dq{};                   // [queries, head_dim], short of the scale
    Matrix dk{};                   // [keys, head_dim], short of the scale
    Matrix dv{};                   // [keys, head_dim_v]
    Traffic moved{};               ///< so far
};

struct Trace {
    Plan plan;
    Selection selection;
    Range queries;  ///< of the tile
    std::int64_t len_q = 0;
    std::int64_t len_kv = 0;
    std::vector<Step> steps;
    std::vector<Moved> moved;  ///< what the last step's Traffic::schedule is made of
    std::vector<float> lse;    // [queries], as the kernel uses it; the backward has +inf for rows that see no key
    std::vector<float> delta;  // [queries], backward only

    std::int64_t count(Coverage coverage) const;
};

/// Which words the trace is in, and which a call that nobody watches uses, in one line for people.
std::string what_ran(const Plan& plan);

/// Runs forward(plan, args, ...) and follows one tile of queries; `args.o` and `args.lse` receive what forward() gives.
/// The plan must be one of a CPU kernel, with one thread, so that steps come in the order of the algorithm: otherwise
/// Error(invalid_argument). Error(unsupported) when the kernel tells nothing. A selection outside the Problem is
/// Error(invalid_argument) naming batch, head or row.
Trace trace_forward(const Plan& plan, const ForwardArgs& args, const Selection& selection, const Execution& how = {});

/// The same for backward(plan, args, ...).
Trace trace_backward(const Plan& plan, const BackwardArgs& args, const Selection& selection, const Execution& how = {});

}  // namespace tessera::walk
