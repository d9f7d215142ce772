// SPDX-License-Identifier: Apache-2.0
//
// The steps of a schedule laid out in time on one multiprocessor. This is a picture of the dependencies, not a
// prediction: every unit runs at its full rate, and nothing else costs time. predict() has the exposed costs of real
// kernels. One multiprocessor has its share of the memory's rate.
#pragma once

#include <cstdint>
#include <vector>

#include "model/machine.hpp"
#include "schedule/schedule.hpp"

namespace tessera::model {

/// The unit that a step occupies.
enum class Unit : std::uint8_t {
    memory,  ///< loads and stores between slow and fast memory
    gemms,   ///< GEMM unit (GPUs: tensor cores)
    exps,    ///< exponential unit (GPUs: SFU)
};
const char* name_of(Unit unit);

/// One step with its time, in microseconds from the start.
struct TimedStep {
    schedule::Step step;
    Unit unit{};
    double begin_us = 0;
    double end_us = 0;
};

/// Lays out the steps. A unit does one step at a time. Loads run up to one tile ahead of the work. A store waits
/// for its work and lets loads pass until then; stored data is loaded again after its store. In `standard`, `fa1` and
/// `fa2`, GEMMs and exponentials alternate step by step. `standard` is three kernels, S, softmax and O, each of which
/// starts when the previous one has ended. In `fa3` the GEMMs of the next tile overlap the exponentials of this one,
/// which wait for their own scores only. Steps come in the order in which their units take them. Throws as
/// schedule::for_each_step(), and Error(unsupported) for a dtype that the machine lacks.
std::vector<TimedStep> timeline(const schedule::Workload& workload, const Machine& machine);

}  // namespace tessera::model
