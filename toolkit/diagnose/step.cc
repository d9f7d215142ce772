// SPDX-License-Identifier: Apache-2.0
#include "diagnose/step.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera::diagnose {
namespace {

using Interval = std::pair<double, double>;  // start, end

/// The length of the union; it sorts the intervals.
double covered(std::vector<Interval>& intervals) {
    std::sort(intervals.begin(), intervals.end());
    double total = 0;
    double end = intervals.empty() ? 0 : intervals.front().first;
    for (const auto& [from, to] : intervals) {
        total += std::max(0.0, to - std::max(from, end));
        end = std::max(end, to);
    }
    return total;
}

}  // namespace

bool StepClock::host_bound() const {
    constexpr double kMostlyIdle = 0.5;
    constexpr std::int64_t kEnoughRuns = 50;
    return runs >= kEnoughRuns && clock_us > 0 && busy() < kMostlyIdle;
}

StepClock clock_of(const Trace& trace, const std::vector<bool>& in_attention) {
    StepClock clock;
    if (!trace.ordered || trace.runs.empty() || trace.tool == "Nsight Compute") return clock;
    std::vector<Interval> all;
    std::vector<Interval> attention;
    double end = 0;
    for (std::size_t i = 0; i < trace.runs.size(); ++i) {
        const KernelRun& run = trace.runs[i];
        if (run.count != 1 || !std::isfinite(run.start_us)) return {};  // a sum has no place in time
        all.emplace_back(run.start_us, run.start_us + run.us);
        end = std::max(end, run.start_us + run.us);
        if (in_attention[i]) attention.push_back(all.back());
    }
    clock.runs = static_cast<std::int64_t>(all.size());
    clock.busy_us = covered(all);
    clock.attention_us = covered(attention);
    clock.clock_us = end - all.front().first;
    return clock;
}

Spread spread_of(std::vector<float>& times) {
    Spread spread;
    if (times.empty()) return spread;
    std::sort(times.begin(), times.end());
    constexpr float kOutlier = 3;
    const float median = times[times.size() / 2];
    spread.runs = static_cast<std::int64_t>(times.size());
    spread.median_us = median;
    spread.worst_us = times.back();
    for (auto time = times.rbegin(); time != times.rend() && *time > kOutlier * median; ++time) {
        ++spread.outliers;
        spread.outliers_us += *time;
    }
    return spread;
}

}  // namespace tessera::diagnose
