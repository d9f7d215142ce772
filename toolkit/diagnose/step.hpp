// SPDX-License-Identifier: Apache-2.0
//
// The whole step of a trace: how busy the GPU is, where its time goes, and which runs of one kernel are outliers.
#pragma once

#include <cstdint>
#include <vector>

#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// The clock's time from the first kernel's start to the last one's end; 0: the trace has no order of time.
struct StepClock {
    double clock_us = 0;
    double busy_us = 0;       ///< a kernel or more ran; the mean of the GPUs
    double attention_us = 0;  ///< a kernel of attention ran; the mean of the GPUs
    std::int64_t runs = 0;
    std::int64_t gpus = 0;    ///< that ran a kernel
    std::int64_t pauses = 0;  ///< a GPU ran nothing for a twentieth of the clock or more
    double pauses_us = 0;     ///< together; the mean of the GPUs
    double longest_pause_us = 0;

    double busy() const { return clock_us > 0 ? busy_us / clock_us : 0; }
    double busy_between_pauses() const { return clock_us > pauses_us ? busy_us / (clock_us - pauses_us) : 0; }
    /// True if the GPU mostly waits for the host. Few kernels say nothing about that.
    bool host_bound() const;
    /// True if it does so in a few long pauses, and not from kernel to kernel.
    bool paused() const;
};

/// `in_attention[i]`: run i belongs to a call of attention.
StepClock clock_of(const Trace& trace, const std::vector<bool>& in_attention);

/// The steps that the profiler marked on the CPU ("ProfilerStep#7"), one after another. The GPU may run behind the CPU,
/// so a step's kernels are those that ran in its time, not those that it launched.
struct MarkedSteps {
    std::int64_t count = 0;
    double us = 0;  ///< of all steps
    double median_us = 0;
    double longest_us = 0;
    std::int64_t longest = 0;  ///< its number
    double busy_us = 0;        ///< part of `us` in which a kernel or more ran; the mean of the GPUs
    double attention_us = 0;   ///< part of `us` in which a kernel of attention ran; the mean of the GPUs
    /// Steps of more than three times the median, such as one that compiles; and the three sums without them.
    std::int64_t outliers = 0;
    double usual_us = 0, usual_busy_us = 0, usual_attention_us = 0;
};

/// No steps: none are marked, or they overlap, as those of several processes do.
MarkedSteps steps_of(const Trace& trace, const std::vector<bool>& in_attention);

/// The GPU's time by kinds of kernels, outside of attention.
struct StepShares {
    double gemm_us = 0;
    double pointwise_us = 0;  ///< elementwise, copies, softmax and norms
    double communication_us = 0;
    double optimizer_us = 0;
    double other_us = 0;
};

/// The times of equal runs.
struct Spread {
    std::int64_t runs = 0;
    double median_us = 0;
    double worst_us = 0;
    std::int64_t outliers = 0;  ///< runs of more than three times the median
    double outliers_us = 0;     ///< their time
};

/// Sorts `times`.
Spread spread_of(std::vector<float>& times);

/// K and V that were copied for each query head before calls of attention.
struct Repeats {
    std::int64_t calls = 0;
    std::int64_t times = 0;     ///< 4: each head of K and V was written four times
    std::int64_t heads_kv = 0;  ///< before that
};

}  // namespace tessera::diagnose
