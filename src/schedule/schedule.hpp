// SPDX-License-Identifier: Apache-2.0
//
// The schedules as data: the steps and the cost of standard, fa1, fa2 and fa3, forward and backward. Nothing here
// computes attention or knows a device.
//
// Counting rules. FLOP and exps count visible pairs: 2 (d + d_v) and 1 per pair in the forward, 2 (3 d + 2 d_v) and 1
// in the backward, which recomputes S. Bytes count packed tensors in the Problem's dtype. Sums in slow memory (O, m, l
// of fa1, dQ, S) are fp32, as in all kernels here. Loads are whole tiles, cut at the tensors' ends. Bias, ALiBi,
// dropout and softcap count nothing.
#pragma once

#include <functional>

#include "schedule/step.hpp"

namespace tessera::schedule {

using Visitor = std::function<void(const Step&)>;

/// Calls visit(step) for every step, in the order in which one multiprocessor would run them.
/// Throws Error(invalid_argument) for a Problem, tile or sequence list that breaks the contract.
void for_each_step(const Workload& workload, const Visitor& visit);

/// The sum of all steps, by enumeration; a check of cost().
Cost sum_of_steps(const Workload& workload);

/// The sum of all steps in closed form: sums over rows (or columns) of tiles, without visiting tiles or pairs. Each
/// schedule's code states its formulas and the paper's sections. Errors as for_each_step().
Cost cost(const Workload& workload);

/// Does every count of the Problem fit an int64? cost() and for_each_step() refuse it if not.
bool countable(const Problem& problem);

using tessera::Footprint;
/// The footprint of one call of this workload.
Footprint footprint(const Workload& workload);

/// {{queries, keys}, times}: the distinct lengths of sequences and how often each occurs.
std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, std::int64_t>> distinct_sequences(
    const Workload& workload);

}  // namespace tessera::schedule
