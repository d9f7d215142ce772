// SPDX-License-Identifier: Apache-2.0
//
// What the library's own kernels reach on the CPU at hand: a few calls of each kind are timed, as `tessera bench` times
// them, and the model's shares of that kind are fitted to them.
#pragma once

#include <functional>
#include <iterator>
#include <vector>

#include "measure/statistics.hpp"
#include "model/machine.hpp"
#include "model/predict.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::measure {

/// A call that is timed.
struct KernelProbe {
    std::int64_t heads = 1;
    std::int64_t len_q = 1;
    std::int64_t len_kv = 1;
    std::int64_t head_dim = 64;
    int threads = 1;
    bool causal = false;
};

/// Heads of a call at most: with more its tensors would take longer to fill than the call to time.
inline constexpr std::int64_t kMostProbeHeads = 128;

/// The calls of a kind on a machine of so many cores.
std::vector<KernelProbe> kernel_probes(Schedule schedule, Pass pass, int cores);

Problem problem_of(const KernelProbe& probe, DType dtype);

/// Milliseconds of a call whose operands begin in memory.
Summary time_probe(const KernelProbe& probe, Schedule schedule, Pass pass, DType dtype);

/// Kernels that are probed, in both passes.
struct ProbedKind {
    Schedule schedule;
    DType dtype;
};
inline constexpr ProbedKind kProbedKinds[] = {{Schedule::fa2, DType::fp32},
                                              {Schedule::fa2, DType::fp16},
                                              {Schedule::fa2, DType::bf16},
                                              {Schedule::fa1, DType::fp32},
                                              {Schedule::standard, DType::fp32}};

/// A call and how long it took.
struct TimedCall {
    Problem problem;
    model::PredictOptions options;
    double ms = 0;
};

/// Calls that were timed several times, once each, with the median of their times.
std::vector<TimedCall> medians_of(const std::vector<TimedCall>& calls);

/// The shares of a kind of kernels with which the model gives these times on the machine, each such as can be
/// (model::range_of_share). Of one core start_us is 0 and crowd 1: no call tells of them.
KernelShares fitted_shares(const model::Machine& machine, Schedule schedule, Pass pass,
                           const std::vector<TimedCall>& calls);

/// Is told of each call that was timed.
using ProbeTimed = std::function<void(const ProbedKind&, Pass, const KernelProbe&, const Summary&)>;

/// All kinds: timed in kProbeRounds rounds, fitted to the medians. `progress` is told before each.
std::vector<MeasuredKernels> measure_kernels(const model::Machine& machine,
                                             const std::function<void(const std::string&)>& progress,
                                             const ProbeTimed& timed = {});

inline constexpr int kProbeRounds = 3;

/// Kinds of kernels that are measured.
inline constexpr int kKernelKinds = 2 * static_cast<int>(std::size(kProbedKinds));

}  // namespace tessera::measure
