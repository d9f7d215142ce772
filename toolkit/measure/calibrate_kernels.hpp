// SPDX-License-Identifier: Apache-2.0
//
// Measures the rates of the library's own kernels on this CPU. A few calls of each kind are timed as in `tessera
// bench`, and the model's shares of that kind are fitted to them.
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

/// Largest number of heads of a call; with more, filling the tensors would take longer than timing the call.
inline constexpr std::int64_t kMostProbeHeads = 128;

/// Returns the calls of a kind on a machine with this many cores.
std::vector<KernelProbe> kernel_probes(Schedule schedule, Pass pass, int cores);

Problem problem_of(const KernelProbe& probe, DType dtype);

/// Returns the milliseconds of a call whose operands start in memory.
Summary time_probe(const KernelProbe& probe, Schedule schedule, Pass pass, DType dtype);

/// A kind of kernels that is probed in both passes.
struct ProbedKind {
    Schedule schedule;
    DType dtype;
};
inline constexpr ProbedKind kProbedKinds[] = {{Schedule::fa2, DType::fp32},
                                              {Schedule::fa2, DType::fp16},
                                              {Schedule::fa2, DType::bf16},
                                              {Schedule::fa1, DType::fp32},
                                              {Schedule::standard, DType::fp32}};

/// A call and its time.
struct TimedCall {
    Problem problem;
    model::PredictOptions options;
    double ms = 0;
};

/// Returns each call once, with the median of its times.
std::vector<TimedCall> medians_of(const std::vector<TimedCall>& calls);

/// Fits the shares of a kind of kernels so that the model reproduces these times, each within model::range_of_share. On
/// one core start_us is 0 and contended_speed 1, because no call measures them.
KernelShares fitted_shares(const model::Machine& machine, Schedule schedule, Pass pass,
                           const std::vector<TimedCall>& calls);

/// Called after each timed call.
using ProbeTimed = std::function<void(const ProbedKind&, Pass, const KernelProbe&, const Summary&)>;

/// Measures all kinds in kProbeRounds rounds, fitted to the medians. `progress` is called before each.
std::vector<MeasuredKernels> measure_kernels(const model::Machine& machine,
                                             const std::function<void(const std::string&)>& progress,
                                             const ProbeTimed& timed = {});

inline constexpr int kProbeRounds = 3;

/// Number of kinds of kernels that are measured.
inline constexpr int kKernelKinds = 2 * static_cast<int>(std::size(kProbedKinds));

}  // namespace tessera::measure
