// SPDX-License-Identifier: Apache-2.0
#include "measure/calibrate_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/numeric.hpp"
#include "measure/bench.hpp"
#include "measure/descent.hpp"
#include "measure/host.hpp"
#include "model/cpu.hpp"
#include "tessera/attention.hpp"

namespace tessera::measure {
namespace {

Method method_of(const KernelProbe& probe) {
    return {.repeat = 5, .warm_up_ms = 3, .rounds = 2, .own_time = probe.threads == 1};
}

/// A dense tensor with numbers in [-1, 1), and memory of its own.
class Filled {
 public:
    Filled(DType dtype, std::int64_t heads, std::int64_t len, std::int64_t dim, std::uint32_t seed)
        : bytes_(static_cast<std::size_t>(heads * len * dim) * size_of(dtype) + kLine) {
        const auto at = reinterpret_cast<std::uintptr_t>(bytes_.data());
        std::byte* const begin = bytes_.data() + (kLine - at % kLine) % kLine;
        if (dim == 1) view = dense_view(begin, dtype, {1, heads, len});  // LSE
        else view = dense_view(begin, dtype, {1, len, heads, dim});
        std::uint32_t state = seed;
        for (std::int64_t i = 0; i < view.size(); ++i) {
            state = state * 1664525U + 1013904223U;
            store_from_double(begin + static_cast<std::size_t>(i) * size_of(dtype), dtype, state * 0x1p-31 - 1);
        }
    }

    TensorView view;

 private:
    static constexpr std::size_t kLine = 64;
    std::vector<std::byte> bytes_;
};

struct ProbeTensors {
    Filled q, k, v, o, d_o, dq, dk, dv, lse;

    ProbeTensors(const KernelProbe& p, DType dtype)
        : q(dtype, p.heads, p.len_q, p.head_dim, 1),
          k(dtype, p.heads, p.len_kv, p.head_dim, 2),
          v(dtype, p.heads, p.len_kv, p.head_dim, 3),
          o(dtype, p.heads, p.len_q, p.head_dim, 4),
          d_o(dtype, p.heads, p.len_q, p.head_dim, 5),
          dq(dtype, p.heads, p.len_q, p.head_dim, 6),
          dk(dtype, p.heads, p.len_kv, p.head_dim, 7),
          dv(dtype, p.heads, p.len_kv, p.head_dim, 8),
          lse(DType::fp32, p.heads, p.len_q, 1, 9) {}

    ForwardArgs forward() const { return {.q = q.view, .k = k.view, .v = v.view, .o = o.view, .lse = lse.view}; }
    BackwardArgs backward() const {
        return {.q = q.view,
                .k = k.view,
                .v = v.view,
                .o = o.view,
                .lse = lse.view,
                .d_o = d_o.view,
                .dq = dq.view,
                .dk = dk.view,
                .dv = dv.view};
    }
};

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

}  // namespace

std::vector<KernelProbe> kernel_probes(Schedule schedule, Pass pass, int cores) {
    std::vector<KernelProbe> probes{{2, 64, 64, 64, 1}, {12, 320, 320, 64, 1}, {6, 320, 320, 160, 1}};
    if (schedule != Schedule::fa2) {
        if (cores > 1)
            probes.push_back({2 * cores, 192, 192, 64, cores}), probes.push_back({cores, 448, 448, 64, cores});
        return probes;
    }
    probes.push_back({10, 448, 448, 96, 1, true});
    if (pass == Pass::forward) probes.push_back({4, 1, 2048, 128, 1});
    if (cores <= 1) return probes;
    const auto some = std::max(2, static_cast<int>(std::lround(std::sqrt(cores))));
    for (const int threads : some < cores ? std::vector<int>{some, cores} : std::vector<int>{cores}) {
        probes.push_back({threads, 128, 128, 64, threads});
        probes.push_back({2 * threads, 512, 512, 64, threads});
        probes.push_back({2 * threads, 320, 320, 160, threads});
        probes.push_back({2 * threads, 448, 448, 96, threads, true});
        if (pass == Pass::forward) probes.push_back({2 * threads, 1, 2048, 128, threads});
    }
    return probes;
}

double probe_milliseconds(const KernelProbe& probe, Schedule schedule, Pass pass, DType dtype) {
    const Problem problem = problem_of(probe, dtype);
    const ProbeTensors tensors(probe, dtype);
    const auto plan_of = [&](Pass which) {
        return plan(problem, {.pass = which, .backend = Backend::cpu, .schedule = schedule, .threads = probe.threads});
    };
    const Plan first = plan_of(Pass::forward);
    const Workspace memory(first);
    const auto call_forward = [&] { forward(first, tensors.forward(), memory); };
    call_forward();
    ColdCache cache(describe_host().cache_bytes);
    std::vector<TensorView> views;
    for (const Filled* t : {&tensors.q, &tensors.k, &tensors.v, &tensors.o, &tensors.lse}) views.push_back(t->view);
    if (pass == Pass::forward) return time_call(call_forward, views, cache, method_of(probe)).ms.median;
    for (const Filled* t : {&tensors.d_o, &tensors.dq, &tensors.dk, &tensors.dv}) views.push_back(t->view);
    const Plan second = plan_of(Pass::backward);
    const Workspace more(second);
    return time_call([&] { backward(second, tensors.backward(), more); }, views, cache, method_of(probe)).ms.median;
}

KernelShares fitted_shares(const model::Machine& machine, Schedule schedule, Pass pass,
                           const std::vector<TimedCall>& calls) {
    /// What a constant is expected to be, and how sure that is: a logarithm's standard deviation.
    struct Free {
        double KernelShares::*member;
        double spread;
    };
    static constexpr Free kFree[] = {{&KernelShares::product_share, 0.5}, {&KernelShares::exp_share, 0.7},
                                     {&KernelShares::call_us, 0.7},       {&KernelShares::start_us, 1.0},
                                     {&KernelShares::crowd, 0.5},         {&KernelShares::read_share, 0.7},
                                     {&KernelShares::pack_ns, 0.4}};
    constexpr double kNoise = 0.05;  // of a time that was measured
    const PredictOptions any;
    KernelShares start = model::cpu_family_of({calls.front().problem, schedule, pass, machine, any}).constants;
    start.call_us = std::max(start.call_us, 15.0);
    start.start_us = 100;
    const auto loss = [&](const KernelShares& shares) {
        double sum = 0;
        for (const TimedCall& call : calls) {
            Prediction prediction;
            prediction.schedule = schedule, prediction.pass = pass;
            model::predict_cpu_family({call.problem, schedule, pass, machine, call.options}, shares, prediction);
            const double error = std::log(prediction.ms / call.ms) / kNoise;
            sum += error * error;
        }
        for (const Free& free : kFree) {
            if (start.*free.member == 0) continue;
            const double away = std::log(shares.*free.member / (start.*free.member)) / free.spread;
            sum += away * away;
        }
        return sum;
    };
    std::vector<double KernelShares::*> members;
    for (const Free& free : kFree) members.push_back(free.member);
    return descend<KernelShares>(start, members, loss);
}

std::vector<MeasuredKernels> measure_kernels(const model::Machine& machine,
                                             const std::function<void(const std::string&)>& progress) {
    struct Kind {
        Schedule schedule;
        DType dtype;
    };
    constexpr Kind kKinds[] = {{Schedule::fa2, DType::fp32},
                               {Schedule::fa2, DType::fp16},
                               {Schedule::fa2, DType::bf16},
                               {Schedule::fa1, DType::fp32},
                               {Schedule::standard, DType::fp32}};
    std::vector<MeasuredKernels> result;
    const int cores = static_cast<int>(machine.cores.value);
    for (const Kind& kind : kKinds) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            const std::string name = model::cpu_kernels_of(kind.schedule, pass, kind.dtype);
            progress(name);
            const auto probes = kernel_probes(kind.schedule, pass, cores);
            std::vector<TimedCall> calls;
            for (const KernelProbe& probe : probes)
                calls.push_back({problem_of(probe, kind.dtype),
                                 {.threads = probe.threads},
                                 probe_milliseconds(probe, kind.schedule, pass, kind.dtype)});
            result.push_back({name, fitted_shares(machine, kind.schedule, pass, calls),
                              fmt::format("{} calls timed by tessera calibrate", probes.size())});
        }
    }
    return result;
}

}  // namespace tessera::measure
