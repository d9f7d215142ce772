// SPDX-License-Identifier: Apache-2.0
#include "measure/calibrate_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <utility>

#include "core/numeric.hpp"
#include "measure/bench.hpp"
#include "measure/descent.hpp"
#include "measure/host.hpp"
#include "model/cpu.hpp"
#include "tessera/attention.hpp"

namespace tessera::measure {
namespace {

Method method_of(const KernelProbe& probe) { return {.repeat = 3, .warm_up_ms = 2, .own_time = probe.threads == 1}; }

/// Count of numbers in [-1, 1) in the pattern. Row lengths do not divide it, so that the rows of a tensor differ.
constexpr std::size_t kPattern = 8191;

std::vector<std::byte> pattern_of(DType dtype) {
    std::vector<std::byte> bytes(kPattern * size_of(dtype));
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < kPattern; ++i) {
        state = state * 1664525U + 1013904223U;
        store_from_double(bytes.data() + i * size_of(dtype), dtype, state * 0x1p-31 - 1);
    }
    return bytes;
}

/// A dense tensor in its own memory. A call writes it before anything reads it, unless it is filled.
class OwnedTensor {
 public:
    OwnedTensor(DType dtype, std::int64_t heads, std::int64_t len, std::int64_t dim)
        : bytes_(std::make_unique_for_overwrite<std::byte[]>(
              static_cast<std::size_t>(heads * len * dim) * size_of(dtype) + kLine)) {
        const auto at = reinterpret_cast<std::uintptr_t>(bytes_.get());
        begin_ = bytes_.get() + (kLine - at % kLine) % kLine;
        if (dim == 1) view = dense_view(begin_, dtype, {1, heads, len});  // LSE
        else view = dense_view(begin_, dtype, {1, len, heads, dim});
    }

    /// Fills it with the repeated pattern, from a different offset for each tensor.
    void fill(std::span<const std::byte> pattern, std::size_t from) {
        const std::size_t bytes = static_cast<std::size_t>(view.size()) * size_of(view.dtype);
        std::size_t at = from * size_of(view.dtype);
        for (std::size_t done = 0; done < bytes; at = 0) {
            const std::size_t some = std::min(bytes - done, pattern.size() - at);
            std::memcpy(begin_ + done, pattern.data() + at, some);
            done += some;
        }
    }

    TensorView view;

 private:
    static constexpr std::size_t kLine = 64;
    std::unique_ptr<std::byte[]> bytes_;
    std::byte* begin_ = nullptr;
};

/// The tensors that a probe's calls read and write; gradients exist in a backward only.
struct ProbeTensors {
    OwnedTensor q, k, v, o, lse;
    std::vector<OwnedTensor> gradients;  // dO, dQ, dK, dV

    ProbeTensors(const KernelProbe& p, Pass pass, DType dtype)
        : q(dtype, p.heads, p.len_q, p.head_dim),
          k(dtype, p.heads, p.len_kv, p.head_dim),
          v(dtype, p.heads, p.len_kv, p.head_dim),
          o(dtype, p.heads, p.len_q, p.head_dim),
          lse(DType::fp32, p.heads, p.len_q, 1) {
        const std::vector<std::byte> pattern = pattern_of(dtype);
        q.fill(pattern, 0), k.fill(pattern, 1000), v.fill(pattern, 2000);
        if (pass == Pass::forward) return;
        for (const std::int64_t len : {p.len_q, p.len_q, p.len_kv, p.len_kv})
            gradients.emplace_back(dtype, p.heads, len, p.head_dim);
        gradients.front().fill(pattern, 3000);
    }

    ForwardArgs forward() const { return {.q = q.view, .k = k.view, .v = v.view, .o = o.view, .lse = lse.view}; }
    BackwardArgs backward() const {
        return {.q = q.view,
                .k = k.view,
                .v = v.view,
                .o = o.view,
                .lse = lse.view,
                .d_o = gradients[0].view,
                .dq = gradients[1].view,
                .dk = gradients[2].view,
                .dv = gradients[3].view};
    }
    std::vector<TensorView> views() const {
        std::vector<TensorView> all{q.view, k.view, v.view, o.view, lse.view};
        for (const OwnedTensor& one : gradients) all.push_back(one.view);
        return all;
    }
};

}  // namespace

Problem problem_of(const KernelProbe& probe, DType dtype) {
    Problem p;
    p.dtype = dtype;
    p.len_q = probe.len_q;
    p.len_kv = probe.len_kv;
    p.heads_q = p.heads_kv = probe.heads;
    p.head_dim = p.head_dim_v = probe.head_dim;
    if (probe.causal) p.mask.causal = Causal::bottom_right;
    return p;
}

std::vector<KernelProbe> kernel_probes(Schedule schedule, Pass pass, int cores) {
    const bool forward = pass == Pass::forward;
    const auto heads_of = [](double heads) { return std::min<std::int64_t>(std::lround(heads), kMostProbeHeads); };
    if (schedule != Schedule::fa2) {
        std::vector<KernelProbe> probes{
            {2, 64, 64, 64, 1}, {12, 384, 384, 64, 1}, {5, 448, 448, 160, 1}, {24, 64, 640, 128, 1}};
        if (cores > 1) {
            probes.push_back({heads_of(2.0 * cores), 192, 192, 64, cores});
            probes.push_back({heads_of(1.5 * cores), 448, 448, 64, cores});
            probes.push_back({heads_of(2.0 * cores), 384, 384, 128, cores});
        }
        return probes;
    }
    std::vector<KernelProbe> probes{
        {2, 64, 64, 64, 1},    {12, 512, 512, 64, 1}, {24, 368, 368, 128, 1},      {5, 352, 352, 224, 1},
        {16, 416, 416, 32, 1}, {24, 80, 640, 128, 1}, {20, 448, 448, 64, 1, true},
    };
    if (forward) probes.push_back({6, 1, 4096, 128, 1});
    if (cores <= 1) return probes;
    const auto some = std::max(2, static_cast<int>(std::lround(std::sqrt(cores))));
    for (const int threads : some < cores ? std::vector<int>{some, cores} : std::vector<int>{cores}) {
        const double n = threads;
        probes.push_back({heads_of(n), 128, 128, 64, threads});
        probes.push_back({2, 960, 960, 64, threads});
        probes.push_back({heads_of(2 * n), 512, 512, 64, threads});
        probes.push_back({heads_of(3 * n), 384, 384, 128, threads});
        probes.push_back({heads_of(1.5 * n), 320, 320, 224, threads});
        probes.push_back({heads_of(4 * n), 448, 448, 64, threads, true});
        probes.push_back({heads_of(3 * n), 80, 640, 128, threads});
        // This call is as large as those of one thread: in small calls, threads compete for caches instead of memory.
        probes.push_back({heads_of(12 * n), 368, 368, 128, threads});
        probes.push_back({heads_of(16 * n), 200, 520, 64, threads});
        if (!forward) continue;
        probes.push_back({heads_of(2 * n), 1, 4096, 128, threads});
        probes.push_back({heads_of(n / 2), 1, 2048, 64, threads});
    }
    return probes;
}

Summary time_probe(const KernelProbe& probe, Schedule schedule, Pass pass, DType dtype) {
    const Problem problem = problem_of(probe, dtype);
    const ProbeTensors tensors(probe, pass, dtype);
    const auto plan_of = [&](Pass which) {
        return plan(problem, {.pass = which, .backend = Backend::cpu, .schedule = schedule, .threads = probe.threads});
    };
    const Plan first = plan_of(Pass::forward);
    const Workspace memory(first);
    const auto call_forward = [&] { forward(first, tensors.forward(), memory); };
    call_forward();
    ColdCache cache(last_level_cache());
    const std::vector<TensorView> views = tensors.views();
    if (pass == Pass::forward) return time_call(call_forward, views, cache, method_of(probe)).ms;
    const Plan second = plan_of(Pass::backward);
    const Workspace more(second);
    return time_call([&] { backward(second, tensors.backward(), more); }, views, cache, method_of(probe)).ms;
}

std::vector<TimedCall> medians_of(const std::vector<TimedCall>& calls) {
    std::vector<TimedCall> kept;
    std::vector<std::vector<double>> times;
    for (const TimedCall& call : calls) {
        const auto same = [&](const TimedCall& one) {
            return one.options.threads == call.options.threads && one.problem.describe() == call.problem.describe();
        };
        const auto at = static_cast<std::size_t>(std::find_if(kept.begin(), kept.end(), same) - kept.begin());
        if (at == kept.size()) kept.push_back(call), times.emplace_back();
        times[at].push_back(call.ms);
    }
    for (std::size_t i = 0; i < kept.size(); ++i) kept[i].ms = summarize(times[i]).median;
    return kept;
}

KernelShares fitted_shares(const model::Machine& machine, Schedule schedule, Pass pass,
                           const std::vector<TimedCall>& calls) {
    /// A constant and its uncertainty: the standard deviation of its logarithm.
    struct Free {
        double KernelShares::*member;
        double spread;
    };
    static constexpr Free kFree[] = {{&KernelShares::gemm_share, 0.5},      {&KernelShares::exp_share, 0.7},
                                     {&KernelShares::call_us, 0.7},         {&KernelShares::start_us, 1.0},
                                     {&KernelShares::contended_speed, 0.5}, {&KernelShares::read_share, 0.7},
                                     {&KernelShares::pack_ns, 0.4},         {&KernelShares::mask_share, 0.4}};
    constexpr double kNoise = 0.05;  // relative noise of a measured time and of the model
    constexpr double kOutlier = 3;   // multiple of the noise beyond which an outlier weighs less and less
    const PredictOptions any;
    // Calls of few queries may run other kernels, which have constants of their own.
    const auto runs_others = [&](const TimedCall& call) {
        return model::runs_few_queries({call.problem, schedule, pass, machine, call.options});
    };
    const auto first = std::find_if_not(calls.begin(), calls.end(), runs_others);
    const Problem& problem = first == calls.end() ? calls.front().problem : first->problem;
    KernelShares start = model::cpu_family_of({problem, schedule, pass, machine, any}).constants;
    start.call_us = std::max(start.call_us, 15.0);
    // One core cannot measure the effect of other threads, which start at once and do not contend.
    const bool single_core = machine.cores <= 1;
    start.start_us = single_core ? 0 : 100;
    if (single_core) start.contended_speed = 1;
    const auto loss = [&](const KernelShares& shares) {
        if (!model::in_range(shares)) return std::numeric_limits<double>::infinity();
        double sum = 0;
        for (const TimedCall& call : calls) {
            if (runs_others(call)) continue;
            Prediction prediction;
            prediction.schedule = schedule, prediction.pass = pass;
            model::predict_cpu_family({call.problem, schedule, pass, machine, call.options}, shares, prediction);
            const double error = std::log(prediction.ms / call.ms) / kNoise;
            sum += kOutlier * kOutlier * std::log1p(error * error / (kOutlier * kOutlier));
        }
        for (const Free& free : kFree) {
            if (start.*free.member == 0) continue;
            const double away = std::log(shares.*free.member / (start.*free.member)) / free.spread;
            sum += away * away;
        }
        return sum;
    };
    std::vector<double KernelShares::*> members;
    for (const Free& free : kFree) {
        if (!single_core || free.member != &KernelShares::contended_speed) members.push_back(free.member);
    }
    return descend<KernelShares>(start, members, loss);
}

std::vector<MeasuredKernels> measure_kernels(const model::Machine& machine,
                                             const std::function<void(const std::string&)>& progress,
                                             const ProbeTimed& timed) {
    // Other work on the machine can slow all calls for seconds. So calls of all kinds come in a random order, and each
    // is timed again in another order after all have run.
    struct Kind {
        ProbedKind kernels;
        Pass pass;
        std::string name;
        std::vector<TimedCall> calls;
    };
    std::vector<Kind> kinds;
    for (const ProbedKind& kernels : kProbedKinds) {
        for (const Pass pass : {Pass::forward, Pass::backward})
            kinds.push_back({kernels, pass, model::cpu_kernel_kind(kernels.schedule, pass, kernels.dtype), {}});
    }
    const int cores = static_cast<int>(machine.cores.value);
    std::vector<std::pair<Kind*, KernelProbe>> all;
    for (Kind& kind : kinds)
        for (const KernelProbe& probe : kernel_probes(kind.kernels.schedule, kind.pass, cores))
            all.emplace_back(&kind, probe);
    std::mt19937 random(1);
    for (int round = 0; round < kProbeRounds; ++round) {
        std::shuffle(all.begin(), all.end(), random);
        for (std::size_t i = 0; i < all.size(); ++i) {
            if (i * kKernelKinds % all.size() < kKernelKinds)
                progress(fmt::format("round {} of {}, {} of {} calls", round + 1, kProbeRounds, i, all.size()));
            const auto& [kind, probe] = all[i];
            const Summary ms = time_probe(probe, kind->kernels.schedule, kind->pass, kind->kernels.dtype);
            if (timed) timed(kind->kernels, kind->pass, probe, ms);
            kind->calls.push_back({problem_of(probe, kind->kernels.dtype), {.threads = probe.threads}, ms.median});
        }
    }
    std::vector<MeasuredKernels> result;
    for (const Kind& kind : kinds) {
        const std::vector<TimedCall> calls = medians_of(kind.calls);
        result.push_back({kind.name, fitted_shares(machine, kind.kernels.schedule, kind.pass, calls),
                          fmt::format("{} calls timed by tessera calibrate", calls.size())});
    }
    return result;
}

}  // namespace tessera::measure
