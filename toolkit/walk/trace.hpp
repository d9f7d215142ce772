// SPDX-License-Identifier: Apache-2.0
//
// A trace records the steps of a CPU kernel on one tile of queries, with the kernel's own numbers. The ordinary kernel
// runs with an observer that copies them. If the plan has no matrix unit, every value has the bits of forward() and
// backward(). With a matrix unit, an unobserved call runs another kernel of the schedule, which describe_run() names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "walk/traffic.hpp"

namespace tessera::walk {

/// Selects the tile of queries that is followed.
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

/// One step of the kernel, or a tile that the mask skips (coverage empty, without values). A step leaves the values of
/// other kinds of steps empty. Queries are those of the trace.
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
    Matrix dq{};                   // [queries, head_dim], before the scale
    Matrix dk{};                   // [keys, head_dim], before the scale
    Matrix dv{};                   // [keys, head_dim_v]
    Traffic moved{};               ///< total until this step
};

struct Trace {
    Plan plan;
    Selection selection;
    Range queries;  ///< queries of the tile
    std::int64_t len_q = 0;
    std::int64_t len_kv = 0;
    std::vector<Step> steps;
    std::vector<Moved> moved;  ///< the parts of the last step's Traffic::schedule
    std::vector<float> lse;    // [queries], as the kernel uses it; the backward has +inf for rows that see no key
    std::vector<float> delta;  // [queries], backward only

    std::int64_t count(Coverage coverage) const;
};

/// Names the code path that the trace ran and the path of an unobserved call, in one line for people.
std::string describe_run(const Plan& plan);

/// Runs forward(plan, args, ...) and follows one tile of queries; `args.o` and `args.lse` receive the results of
/// forward(). The plan must be of a CPU kernel with one thread, so that steps come in the order of the algorithm;
/// otherwise Error(invalid_argument). A kernel without an observer gives Error(unsupported). A selection outside the
/// Problem gives Error(invalid_argument) naming batch, head or row.
Trace trace_forward(const Plan& plan, const ForwardArgs& args, const Selection& selection, const Execution& how = {});

/// Runs backward(plan, args, ...) and follows one tile of queries, as trace_forward() does.
Trace trace_backward(const Plan& plan, const BackwardArgs& args, const Selection& selection, const Execution& how = {});

}  // namespace tessera::walk
