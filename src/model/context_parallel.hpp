// SPDX-License-Identifier: Apache-2.0
//
// One group of key heads (a step) of a call over several GPUs, and the steps in time.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/predict_context_parallel.hpp"

namespace tessera::model {

/// The times of a step on the GPU that is done last, in milliseconds, each as if it ran alone.
struct RankStep {
    double pack = 0;     ///< its own rows of K and V to where others read them (by copies: those of all steps, once)
    double gather = 0;   ///< rows of K and V of the other GPUs, by NCCL
    double copy = 0;     ///< the keys of its runs, in order
    double kernels = 0;  ///< attention
    double parts = 0;    ///< backward, by NCCL: dK and dV into the order in which they are sent
    double scatter = 0;  ///< backward: their way to the GPUs that hold the keys
    double sum = 0;      ///< backward: the addition of what has arrived

    double exchange() const { return pack + gather + copy + parts + scatter + sum; }
};

/// The key heads of each of so many steps.
std::vector<std::int64_t> equal_steps(std::int64_t heads, std::int64_t count);

/// The key heads of each step as tessera.torch chooses them (steps_of() of _context_parallel/_setup.py). `mib`: of K
/// and V of a GPU's rows. `copies`: the GPUs copy from each other.
std::vector<std::int64_t> steps_of(std::int64_t heads, double mib, Pass pass, bool copies);

/// The steps in time.
struct RanksInTime {
    double ms = 0;
    double hidden_ms = 0;
    std::vector<Part> parts;
};

/// Puts the steps in time as tessera.torch enqueues them: K and V of the next step travel while the kernels of this one
/// run, and its gradients while those of the next one do. `documents`: the host needs longer for packed documents.
RanksInTime in_time(const std::vector<RankStep>& steps, Pass pass, bool documents = false);

/// A step of a ring: its kernels, the merge of its result, and the exchange that runs beside them.
struct RingTimes {
    double own = 0;       ///< the kernels on the GPU's own keys
    double other = 0;     ///< on the keys of another GPU
    double merge = 0;     ///< O (backward: dQ) of one more GPU's keys
    double exchange = 0;  ///< rows of one GPU to the next
};
double ring_in_time(const RingTimes& times, int ranks, Pass pass);

}  // namespace tessera::model
