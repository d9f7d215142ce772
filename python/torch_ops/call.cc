// SPDX-License-Identifier: Apache-2.0
#include "call.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace tessera::torch_ops {
namespace {

void expect_rank(const char* argument, TensorRef tensor, std::int64_t rank, bool heads_first) {
    if (tensor.dim() == rank) return;
    const char* dense = heads_first ? "[batch, heads, len, head_dim]" : "[batch, len, heads, head_dim]";
    invalid(argument, "expected " + std::to_string(rank) + " dimensions (" +
                          (rank == 4 ? dense : "[total, heads, head_dim]") + "), got " + std::to_string(tensor.dim()));
}

/// The length of the longest sequence. On CUDA it is `total`, an upper bound: reading lengths would wait for the
/// device.
std::int64_t longest(const char* argument, TensorRef cu_seqlens, std::int64_t total) {
    if (cu_seqlens.is_cuda()) return total;
    const TensorView view = view_of(argument, cu_seqlens);
    if (view.rank != 1) invalid(argument, "expected 1 dimension, got " + std::to_string(view.rank));
    const auto entry = [&](std::int64_t i) {
        return view.dtype == DType::int32 ? std::int64_t{*view.at<std::int32_t>(i)} : *view.at<std::int64_t>(i);
    };
    if (view.dtype != DType::int32 && view.dtype != DType::int64) invalid(argument, "expected int32 or int64");
    std::int64_t length = 0;
    for (std::int64_t b = 0; b + 1 < view.shape[0]; ++b) length = std::max(length, entry(b + 1) - entry(b));
    return std::clamp(length, std::int64_t{0}, total);
}

std::uint64_t seed_of(const Inputs& in, double dropout_p) {
    if (dropout_p == 0) return 0;
    if (!in.seed.has_value()) invalid("seed", "expected a tensor int64 [1] with dropout, got none");
    const TensorView view = view_of("seed", in.seed);
    if (view.device.type != DeviceType::cpu || view.dtype != DType::int64 || view.size() != 1) {
        invalid("seed", "expected one int64 in host memory, got " + view.describe());
    }
    return static_cast<std::uint64_t>(*view.at<std::int64_t>(0));
}

std::int64_t window_side(const char* argument, std::int64_t side) {
    if (side < -1) invalid(argument, "expected a number of keys, or -1 for no limit, got " + std::to_string(side));
    return side == -1 ? unbounded : side;
}

Causal causal_of(std::int64_t causal) {
    if (causal < 0 || causal > 2) invalid("causal", "expected 0, 1 or 2, got " + std::to_string(causal));
    return static_cast<Causal>(causal);
}

/// Whether two problems have one plan: they differ in the seed of dropout at most.
bool equal_but_for_seed(const Problem& a, Problem b) {
    b.dropout.seed = a.dropout.seed;
    return a == b;
}

/// The last plans of one thread and pass. A full cache replaces its oldest entry.
class PlanCache {
 public:
    const Plan& plan_for(const Problem& problem, const PlanOptions& options) {
        const auto matches = [&](const Entry& e) {
            return e.options.threads == options.threads && e.options.device == options.device &&
                   e.options.kernel == options.kernel && equal_but_for_seed(e.plan.problem, problem);
        };
        const auto found = std::find_if(entries_.begin(), entries_.end(), matches);
        Plan& cached = found != entries_.end() ? found->plan : insert(problem, options);
        cached.problem.dropout.seed = problem.dropout.seed;
        return cached;
    }

 private:
    struct Entry {
        PlanOptions options;
        Plan plan;
    };
    static constexpr std::size_t kCapacity = 16;  // more than the kinds of layers that a model has

    Plan& insert(const Problem& problem, const PlanOptions& options) {
        Entry entry{options, plan(problem, options)};
        if (entries_.size() < kCapacity) return entries_.emplace_back(std::move(entry)).plan;
        Entry& oldest = entries_[oldest_++ % kCapacity];
        oldest = std::move(entry);
        return oldest.plan;
    }

    std::vector<Entry> entries_;
    std::size_t oldest_ = 0;
};

}  // namespace

Problem problem_of(const Inputs& in, const Settings& settings, bool bias_gradient) {
    const bool ragged = in.cu_seqlens_q.has_value();
    if (ragged != in.cu_seqlens_kv.has_value()) {
        invalid(ragged ? "cu_seqlens_kv" : "cu_seqlens_q", "expected both cu_seqlens or none, got one");
    }
    const std::int64_t rank = ragged ? 3 : 4;
    const std::int64_t heads = settings.heads_first ? 1 : rank - 2;
    const std::int64_t len = settings.heads_first ? 2 : 1;
    if (ragged && settings.heads_first) invalid("heads_first", "expected false with cu_seqlens, got true");
    expect_rank("q", in.q, rank, settings.heads_first);
    expect_rank("k", in.k, rank, settings.heads_first);
    expect_rank("v", in.v, rank, settings.heads_first);
    if (const DType dtype = dtype_of("q", in.q); !is_floating(dtype)) {
        invalid("q", std::string("expected dtype float32, bfloat16, float16 or float64, got ") + name_of(dtype));
    }
    Problem p{.dtype = dtype_of("q", in.q),
              .heads_q = in.q.size(heads),
              .heads_kv = in.k.size(heads),
              .head_dim = in.q.size(rank - 1),
              .head_dim_v = in.v.size(rank - 1),
              .ragged = ragged,
              .mask = {causal_of(settings.causal), window_side("window_left", settings.window_left),
                       window_side("window_right", settings.window_right)},
              .scale = settings.scale,
              .softcap = settings.softcap,
              .bias_gradient = bias_gradient,
              .dropout = {settings.dropout_p, seed_of(in, settings.dropout_p)}};
    set_options(p, in);
    if (ragged) {
        p.total_q = in.q.size(0);
        p.total_kv = in.k.size(0);
        p.batch = std::max<std::int64_t>(in.cu_seqlens_q.numel() - 1, 0);
        p.len_q = settings.max_len_q >= 0 ? settings.max_len_q : longest("cu_seqlens_q", in.cu_seqlens_q, p.total_q);
        p.len_kv =
            settings.max_len_kv >= 0 ? settings.max_len_kv : longest("cu_seqlens_kv", in.cu_seqlens_kv, p.total_kv);
    } else {
        p.batch = in.q.size(0);
        p.len_q = in.q.size(len);
        p.len_kv = in.k.size(len);
    }
    return p;
}

const Plan& plan_of(const Problem& problem, Pass pass, const Settings& settings, TensorRef q) {
    PlanOptions options{.pass = pass, .kernel = settings.kernel.value_or("")};
    set_device_and_threads(options, q);
    thread_local PlanCache caches[2];
    return caches[pass == Pass::forward ? 0 : 1].plan_for(problem, options);
}

const Plan* next_plan(const Plan& plan, const Settings& settings) {
    if (settings.kernel.has_value()) return nullptr;
    const auto next =
        std::find_if(plan.refused.begin(), plan.refused.end(), [](const Refusal& r) { return r.capable; });
    if (next == plan.refused.end()) return nullptr;
    thread_local PlanCache caches[2];
    const PlanOptions options{
        .pass = plan.pass, .kernel = next->kernel->name, .threads = plan.threads, .device = plan.device};
    return &caches[plan.pass == Pass::forward ? 0 : 1].plan_for(plan.problem, options);
}

bool copies_pay(const Problem& p, Pass pass) {
    if (p.ragged) return true;
    const auto sum = [](std::int64_t a, std::int64_t b) { return a > unbounded - b ? unbounded : a + b; };
    const std::int64_t width = sum(sum(p.mask.window_left, p.mask.window_right), 1);
    double keys = static_cast<double>(std::min(p.len_kv, width));  // that a query sees, about
    if (p.mask.causal != Causal::none && width >= p.len_kv) keys /= 2;
    const bool backward = pass == Pass::backward;
    const double rows = static_cast<double>(p.len_q) * (backward ? 2 : 1) + 2.0 * static_cast<double>(p.len_kv);
    // For each element of a row: 2 GEMMs or 5, of 2 FLOP a pair, and a copy that reads and writes 2 bytes.
    const double flop = (backward ? 10.0 : 4.0) * static_cast<double>(p.len_q) * keys;
    constexpr double kFlopPerByte = 295;
    return flop >= kFlopPerByte * 4 * rows;
}

}  // namespace tessera::torch_ops
