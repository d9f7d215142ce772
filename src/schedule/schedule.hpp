// SPDX-License-Identifier: Apache-2.0
//
// The schedules as data: for each of standard, fa1, fa2 and fa3, forward and backward, its steps and its cost. Nothing
// here computes attention, and nothing knows a device.
//
// Counting rules. FLOP and exps are those of visible pairs (2 (d + d_v) and 1 for each pair in the forward; 2 (3 d + 2
// d_v) and 1 in the backward, which makes S again). Bytes are those of packed tensors in the Problem's dtype; sums that
// live in slow memory (O, m, l of fa1, dQ, S) are fp32, as all kernels here keep them. Loads are whole tiles, cut at
// the tensors' ends. Bias, ALiBi, dropout and softcap move and count nothing.
#pragma once

#include <functional>

#include "schedule/step.hpp"

namespace tessera::schedule {

using Visitor = std::function<void(const Step&)>;

/// Calls visit(step) for every step, in the order in which one multiprocessor would run them.
/// Throws Error(invalid_argument) for a Problem, tile or sequence list that breaks the contract.
void for_each_step(const Workload& workload, const Visitor& visit);

/// The sum of all steps, by going through them: what cost() must agree with.
Cost sum_of_steps(const Workload& workload);

/// The same in closed form: sums over rows (or columns) of tiles, without going through tiles or pairs. The formulas
/// and the paper's sections stand beside each schedule's code. Errors as for_each_step().
Cost cost(const Workload& workload);

/// Can every count of the Problem be told in an int64? cost() and for_each_step() refuse it where not.
bool countable(const Problem& problem);

using tessera::Footprint;
/// Of one call of this workload.
Footprint footprint(const Workload& workload);

/// (queries, keys) of every sequence, and how many sequences are alike: {{q, kv}, times}.
std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, std::int64_t>> distinct_sequences(
    const Workload& workload);

}  // namespace tessera::schedule
