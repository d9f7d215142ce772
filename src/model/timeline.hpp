// SPDX-License-Identifier: Apache-2.0
//
// The steps of a schedule laid out in time on one multiprocessor: a picture of who waits for whom, not a prediction.
// Every unit runs at its full rate and nothing else costs time; predict() has what real kernels leave exposed. One
// multiprocessor has its share of the memory's rate.
#pragma once

#include <cstdint>
#include <vector>

#include "model/machine.hpp"
#include "schedule/schedule.hpp"

namespace tessera::model {

/// What a step keeps busy.
enum class Unit : std::uint8_t {
    memory,    ///< loads and stores between slow and near memory
    products,  ///< the unit of matrix products
    exps,      ///< the unit of exponentials
};
const char* name_of(Unit unit);

/// One step with its time, in microseconds from the start.
struct TimedStep {
    schedule::Step step;
    Unit unit{};
    double begin_us = 0;
    double end_us = 0;
};

/// Rules, for every schedule: a unit does one step at a time; what is loaded is loaded up to one tile ahead of the
/// work; a store waits for the work before it, and lets loads pass until then; what was stored is loaded again after
/// its store. `standard`, `fa1`, `fa2`: products and exponentials wait for each other, step by step. `standard` is
/// three kernels: S, softmax and O; each begins when the one before has ended. `fa3`: the products of the next tile run
/// beside the exponentials of this one, which wait for their own scores only. Steps come in the order in which their
/// units take them. Throws as schedule::for_each_step(), and Error(unsupported) for a dtype that the machine lacks.
std::vector<TimedStep> timeline(const schedule::Workload& workload, const Machine& machine);

}  // namespace tessera::model
