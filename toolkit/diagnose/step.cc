// SPDX-License-Identifier: Apache-2.0
#include "diagnose/step.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace tessera::diagnose {
namespace {

using Interval = std::pair<double, double>;  // start, end

/// Sorts intervals and joins those that touch.
void join(std::vector<Interval>& intervals) {
    std::sort(intervals.begin(), intervals.end());
    std::size_t kept = 0;
    for (const Interval& one : intervals) {
        if (kept > 0 && one.first <= intervals[kept - 1].second)
            intervals[kept - 1].second = std::max(intervals[kept - 1].second, one.second);
        else intervals[kept++] = one;
    }
    intervals.resize(kept);
}

double length_of(const std::vector<Interval>& joined) {
    double total = 0;
    for (const auto& [from, to] : joined) total += to - from;
    return total;
}

/// The part of `joined` within windows, which are sorted and do not overlap.
double length_within(const std::vector<Interval>& joined, const std::vector<Interval>& windows) {
    double total = 0;
    std::size_t at = 0;
    for (const auto& [from, to] : windows) {
        while (at < joined.size() && joined[at].second <= from) ++at;
        for (std::size_t i = at; i < joined.size() && joined[i].first < to; ++i)
            total += std::min(to, joined[i].second) - std::max(from, joined[i].first);
    }
    return total;
}

/// When the kernels of a GPU ran.
struct Busy {
    std::vector<Interval> all, attention;  // joined
    double first_us = 0, last_us = 0;
    std::int64_t runs = 0;
};

/// When the kernels of each GPU ran. Empty: the trace has no order of time.
std::vector<Busy> busy_of(const Trace& trace, const std::vector<bool>& in_attention) {
    if (!trace.ordered || trace.runs.empty() || trace.tool == "Nsight Compute") return {};
    std::map<std::uint32_t, Busy> gpus;
    for (std::size_t i = 0; i < trace.runs.size(); ++i) {
        const KernelRun& run = trace.runs[i];
        if (run.count != 1 || !std::isfinite(run.start_us)) return {};  // a sum has no place in time
        const auto device = trace.device_of_stream.find(run.stream);
        Busy& busy = gpus[device == trace.device_of_stream.end() ? 0 : device->second];
        busy.all.emplace_back(run.start_us, run.start_us + run.us);
        if (in_attention[i]) busy.attention.push_back(busy.all.back());
    }
    std::vector<Busy> all;
    for (auto& [device, busy] : gpus) {
        busy.runs = static_cast<std::int64_t>(busy.all.size());
        join(busy.all);
        join(busy.attention);
        busy.first_us = busy.all.front().first;
        busy.last_us = busy.all.back().second;
        all.push_back(std::move(busy));
    }
    return all;
}

}  // namespace

bool StepClock::host_bound() const {
    constexpr double kMostlyIdle = 0.5;
    constexpr std::int64_t kEnoughRuns = 50;
    return runs >= kEnoughRuns && clock_us > 0 && busy() < kMostlyIdle;
}

bool StepClock::paused() const {
    constexpr double kMostlyIdle = 0.5;
    return host_bound() && pauses > 0 && busy_between_pauses() >= kMostlyIdle;
}

StepClock clock_of(const Trace& trace, const std::vector<bool>& in_attention) {
    constexpr double kLongPause = 0.05;  // of the clock
    const std::vector<Busy> gpus = busy_of(trace, in_attention);
    StepClock clock{.gpus = static_cast<std::int64_t>(gpus.size())};
    if (gpus.empty()) return clock;
    double first = gpus.front().first_us, last = gpus.front().last_us;
    for (const Busy& busy : gpus) first = std::min(first, busy.first_us), last = std::max(last, busy.last_us);
    clock.clock_us = last - first;
    const double share = 1 / static_cast<double>(gpus.size());
    for (const Busy& busy : gpus) {
        clock.busy_us += share * length_of(busy.all);
        clock.attention_us += share * length_of(busy.attention);
        clock.runs += busy.runs;
        std::int64_t pauses = 0;
        double before = first;
        for (std::size_t i = 0; i <= busy.all.size(); ++i) {
            const double pause = (i < busy.all.size() ? busy.all[i].first : last) - before;
            if (i < busy.all.size()) before = busy.all[i].second;
            if (pause < kLongPause * clock.clock_us) continue;
            ++pauses;
            clock.pauses_us += share * pause;
            clock.longest_pause_us = std::max(clock.longest_pause_us, pause);
        }
        clock.pauses = std::max(clock.pauses, pauses);
    }
    return clock;
}

MarkedSteps steps_of(const Trace& trace, const std::vector<bool>& in_attention) {
    std::vector<MarkedStep> marked = trace.steps;
    std::sort(marked.begin(), marked.end(),
              [](const MarkedStep& a, const MarkedStep& b) { return a.start_us < b.start_us; });
    MarkedSteps steps;
    std::vector<Interval> windows;
    std::vector<double> times;
    for (const MarkedStep& step : marked) {
        if (!(step.end_us > step.start_us) || !std::isfinite(step.end_us)) return {};
        if (!windows.empty() && step.start_us < windows.back().second) return {};
        windows.emplace_back(step.start_us, step.end_us);
        times.push_back(step.end_us - step.start_us);
        steps.us += times.back();
        if (times.back() > steps.longest_us) steps.longest_us = times.back(), steps.longest = step.number;
    }
    const std::vector<Busy> gpus = busy_of(trace, in_attention);
    if (windows.empty() || gpus.empty()) return {};
    std::sort(times.begin(), times.end());
    steps.count = static_cast<std::int64_t>(times.size());
    steps.median_us = times[times.size() / 2];
    constexpr double kOutlier = 3;
    std::vector<Interval> usual;
    for (const Interval& window : windows) {
        const double us = window.second - window.first;
        if (us > kOutlier * steps.median_us) ++steps.outliers;
        else usual.push_back(window), steps.usual_us += us;
    }
    for (const Busy& busy : gpus) {
        steps.usual_busy_us += length_within(busy.all, usual) / static_cast<double>(gpus.size());
        steps.usual_attention_us += length_within(busy.attention, usual) / static_cast<double>(gpus.size());
        steps.busy_us += length_within(busy.all, windows) / static_cast<double>(gpus.size());
        steps.attention_us += length_within(busy.attention, windows) / static_cast<double>(gpus.size());
    }
    return steps;
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
