// SPDX-License-Identifier: Apache-2.0
//
// The steps of a call over several GPUs in time: the caller's stream, a stream for copies, the stream of the
// collectives, and the host that enqueues all of them.
#include <algorithm>
#include <iterator>

#include "model/context_parallel.hpp"

namespace tessera::model {
namespace {

/// Milliseconds of Python, forward and backward. A CUDA graph has none of this.
struct Host {
    double call[2];       ///< in which it enqueues a call
    double step[2];       ///< and one step of it
    double documents[2];  ///< additionally a step with packed documents, whose order is a tensor
    double gaps[2];       ///< what a call takes longer where the GPU is slower: gaps between launches
};
/// Chosen on two H200 by the calls with 2,048 rows a GPU, 32/8 heads of 128, and by documents of 8,192
/// (bench/results/h200/waiting/context_parallel.jsonl).
constexpr Host kWithCopies{{0.1, 1.1}, {0.22, 0.4}, {0.15, 0}, {0.03, 0.03}};
constexpr Host kWithNccl{{0.1, 1.6}, {0.5, 0.6}, {0.1, 0}, {0.08, 0.4}};

/// Kernels beside an exchange of NCCL, which takes multiprocessors, take longer by twice its time, and by a fifth at
/// most. Measured on two H200: two forwards of 1.63 ms took 0.33 ms longer with an all_gather of 0.158 ms beside them,
/// whether it came before or after the first. Copies between GPUs take none.
double slowdown_by_exchange(double kernels, double exchange) {
    constexpr double kOfExchange = 2, kOfKernels = 0.2;
    return std::min(kOfExchange * exchange, kOfKernels * kernels);
}

/// Milliseconds of a step's exchange by NCCL, which runs beside the kernels of another step.
double by_nccl(const RankStep& step, bool gradients) {
    return step.gather > 0 ? gradients ? step.scatter : step.gather : 0;
}

/// The caller's stream. Each move of its clock is a part of the time.
class Caller {
 public:
    double now = 0;
    void add(const char* name, double ms) {
        if (!(ms > 0)) return;
        now += ms;
        const auto same = std::find_if(parts.begin(), parts.end(), [&](const Part& part) { return part.name == name; });
        if (same == parts.end()) parts.push_back({name, ms});
        else same->ms += ms;
    }
    void wait(const char* name, double until) { add(name, until - now); }
    std::vector<Part> parts;
};

}  // namespace

std::vector<std::int64_t> equal_steps(std::int64_t heads, std::int64_t count) {
    count = std::min(count, heads);
    std::vector<std::int64_t> of_steps;
    for (std::int64_t s = 0; s < count; ++s) of_steps.push_back(heads * (s + 1) / count - heads * s / count);
    return of_steps;
}

std::vector<std::int64_t> steps_of(std::int64_t heads, double mib, Pass pass, bool copies) {
    struct Steps {
        double mib;
        int forward, backward;
    };
    constexpr Steps kSteps[] = {{512, 8, 8}, {256, 8, 4}, {64, 4, 1}, {16, 2, 1}, {0, 1, 1}};
    if (copies && pass == Pass::forward && heads >= 8 && mib >= 32 && mib < 256)
        return {heads / 8, heads * 3 / 8 - heads / 8, heads - heads * 3 / 8};
    const Steps& own =
        *std::find_if(std::begin(kSteps), std::end(kSteps), [&](const Steps& s) { return mib >= s.mib; });
    return equal_steps(heads, pass == Pass::forward ? own.forward : own.backward);
}

RanksInTime in_time(const std::vector<RankStep>& steps, Pass pass, bool documents) {
    const bool backward = pass == Pass::backward;
    const auto of_pass = static_cast<std::size_t>(backward);
    Caller caller;
    double side = 0, collective = 0, exposed = 0, all = 0;
    std::vector<double> ready(steps.size()), done(steps.size()), arrived(steps.size());
    const auto start = [&](std::size_t s) {
        if (s >= 2) side = std::max(side, done[s - 2]);
        side += steps[s].pack;
        collective = std::max(collective, side) + steps[s].gather;
        side = collective + steps[s].copy;
        ready[s] = side;
    };
    const auto add_up = [&](std::size_t s) {
        const double before = caller.now;
        caller.wait("last gradients", arrived[s]);
        caller.add("sums of dK and dV", steps[s].sum);
        exposed += caller.now - before;
    };
    start(0);
    for (std::size_t s = 0; s < steps.size(); ++s) {
        const RankStep& step = steps[s];
        double beside = s > 0 ? by_nccl(steps[s - 1], true) : 0;
        if (s + 1 < steps.size()) {
            start(s + 1);
            beside += by_nccl(steps[s + 1], false);
        }
        const double before = caller.now;
        caller.wait(s == 0 ? "first exchange" : "waiting for exchanges", ready[s]);
        exposed += caller.now - before;
        caller.add("kernels", step.kernels);
        caller.add("kernels beside an exchange", slowdown_by_exchange(step.kernels, beside));
        done[s] = caller.now;
        if (backward) {
            if (s > 0) add_up(s - 1);
            caller.add("dK and dV packed", step.parts);
            exposed += step.parts;
            collective = std::max(collective, caller.now) + step.scatter;
            arrived[s] = collective;
        }
        all += step.exchange();
    }
    if (backward && !steps.empty()) add_up(steps.size() - 1);
    // Calls follow each other, and the host enqueues the next one while the GPU is at work: the slower one counts.
    const Host& python = !steps.empty() && steps[0].gather > 0 ? kWithNccl : kWithCopies;
    const double of_step = python.step[of_pass] + (documents ? python.documents[of_pass] : 0);
    const double host = python.call[of_pass] + of_step * static_cast<double>(steps.size());
    caller.wait("host", std::max(host, caller.now + python.gaps[of_pass]));
    return {caller.now, std::max(0.0, all - exposed), std::move(caller.parts)};
}

double ring_in_time(const RingTimes& times, int ranks, Pass pass) {
    const auto of_pass = static_cast<std::size_t>(pass == Pass::backward);
    const auto others = static_cast<double>(ranks - 1);
    const auto beside = [&](double kernels) {
        return std::max(kernels + slowdown_by_exchange(kernels, times.exchange), times.exchange);
    };
    const double first = ranks > 1 ? beside(times.own) : times.own;
    const double middle = others > 1 ? (others - 1) * beside(times.other + times.merge) : 0;
    const double last = ranks > 1 ? times.other + times.merge : 0;
    // In the backward dK and dV take one more step, to the GPU that has the keys.
    const double gpu = first + middle + last + (of_pass == 1 && ranks > 1 ? times.exchange : 0);
    return std::max(gpu + kWithNccl.gaps[of_pass],
                    kWithNccl.call[of_pass] + kWithNccl.step[of_pass] * static_cast<double>(ranks));
}

}  // namespace tessera::model
