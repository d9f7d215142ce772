// SPDX-License-Identifier: Apache-2.0
#include "model/cpu_tasks.hpp"

#include <algorithm>
#include <optional>
#include <queue>

namespace tessera::model {
namespace {

/// The time until the last of `threads` is done, if each free thread takes the next task.
double makespan(const std::vector<double>& clocks, int threads) {
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int i = 0; i < threads; ++i) free.push(0);
    double last = 0;
    for (const double task : clocks) {
        const double end = free.top() + task;
        free.pop();
        free.push(end);
        last = std::max(last, end);
    }
    return last;
}

/// Simulates stripes: a thread takes the ready block of the stripe that has the most left.
class StripesRun {
 public:
    StripesRun(const std::vector<std::vector<std::vector<Amounts>>>& stripes, const Cost& cost)
        : stripes_(stripes), cost_(cost) {
        for (const auto& head : stripes) next_.emplace_back(head.size(), 0), runs_.emplace_back(head.size(), false);
    }

    double done(int threads) {
        using Event = std::tuple<double, std::size_t, std::size_t>;
        std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
        double now = 0;
        for (int free = threads;; ++free) {
            for (; free > 0; --free) {
                const auto at = ready();
                if (!at) break;
                const auto [head, stripe] = *at;
                runs_[head][stripe] = true;
                events.emplace(now + cost_(stripes_[head][stripe][next_[head][stripe]]), head, stripe);
            }
            if (events.empty()) return now;
            const auto [end, head, stripe] = events.top();
            events.pop();
            now = end;
            runs_[head][stripe] = false;
            ++next_[head][stripe];
        }
    }

 private:
    std::optional<std::pair<std::size_t, std::size_t>> ready() const {
        std::optional<std::pair<std::size_t, std::size_t>> best;
        std::size_t most = 0;
        for (std::size_t head = 0; head < stripes_.size(); ++head) {
            for (std::size_t i = 0; i < stripes_[head].size(); ++i) {
                const std::size_t left = stripes_[head][i].size() - next_[head][i];
                const bool waits = i > 0 && next_[head][i - 1] <= next_[head][i];
                if (left > most && !runs_[head][i] && !waits) most = left, best = {head, i};
            }
        }
        return best;
    }

    const std::vector<std::vector<std::vector<Amounts>>>& stripes_;
    const Cost& cost_;
    std::vector<std::vector<std::size_t>> next_;
    std::vector<std::vector<bool>> runs_;
};

}  // namespace

Amounts& Amounts::operator+=(const Amounts& other) {
    flop += other.flop, exps += other.exps, masked += other.masked, packed += other.packed;
    return *this;
}

Amounts Loop::sum() const {
    Amounts all;
    for (const Amounts& task : tasks) all += task;
    for (const auto& head : stripes) {
        for (const auto& stripe : head)
            for (const Amounts& block : stripe) all += block;
    }
    return all;
}

double Loop::done(int threads, const Cost& cost) const {
    if (even) return cost(sum()) / threads;
    if (!stripes.empty()) return StripesRun(stripes, cost).done(threads);
    std::vector<double> clocks;
    clocks.reserve(tasks.size());
    for (const Amounts& task : tasks) clocks.push_back(cost(task));
    return makespan(clocks, threads);
}

Lengths lengths_of(const schedule::Workload& w) {
    if (!w.sequences.empty()) return {w.sequences.begin(), w.sequences.end()};
    return Lengths(static_cast<std::size_t>(w.problem.batch), {w.problem.len_q, w.problem.len_kv});
}

std::vector<Loop> loops_of(const schedule::Workload& workload, const CpuWorkSplit& work_split) {
    return workload.pass == Pass::forward ? forward_loops(workload, work_split) : backward_loops(workload, work_split);
}

}  // namespace tessera::model
