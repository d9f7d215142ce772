// SPDX-License-Identifier: Apache-2.0
//
// Calls on the CPU: kernels run on PyTorch's own threads, so that they don't compete with those of its other operators.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "node.hpp"

namespace tessera::torch_ops {
namespace {

int torch_threads() {
    std::uint32_t threads = 1;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    return static_cast<int>(std::clamp<std::uint32_t>(threads, 1, 1024));
}

/// One parallel loop on PyTorch's threads: each takes the next task until none is left. Whoever gets several workers'
/// parts (PyTorch runs a loop inside a loop on one thread) finds nothing to do after the first.
struct Loop {
    std::int64_t tasks;
    const TaskBody& body;
    std::atomic<std::int64_t> next{0};
    std::mutex mutex{};
    std::exception_ptr failure{};

    void run(std::int64_t worker) noexcept {
        try {
            for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
                body(task, static_cast<int>(worker));
            }
        } catch (...) {
            next.store(tasks);
            const std::lock_guard lock(mutex);
            failure = std::current_exception();
        }
    }
};

void torch_parallel(std::int64_t tasks, int workers, const TaskBody& body) {
    Loop loop{.tasks = tasks, .body = body};
    const std::int64_t parts = std::min<std::int64_t>(workers, tasks);
    const auto run = [](std::int64_t begin, std::int64_t end, void* context) {
        for (std::int64_t worker = begin; worker < end; ++worker) static_cast<Loop*>(context)->run(worker);
    };
    STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, parts, 1, run, &loop));
    if (loop.failure) std::rethrow_exception(loop.failure);
}

// PyTorch's operator for backends that bring an attention of their own. It has more results than this one.
using Fused = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t, std::int64_t, Tensor, Tensor, Tensor>;

Fused fused_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias, double code, bool is_causal,
               bool return_debug_mask, std::optional<double> scale) {
    return with_torch_errors([&]() -> Fused {
        if (bias.has_value() || is_causal || return_debug_mask) refuse_other_settings();
        auto [o, kept] = node_forward({q, k, v}, code, scale);
        const Tensor none;
        return {std::move(o), std::move(kept), none, none, 0, 0, none, none, none};
    });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_backward_op(
    const Tensor d_o, const Tensor q, const Tensor k, const Tensor v, const Tensor /*bias*/,
    const std::vector<bool> /*wanted*/, const Tensor o, const Tensor kept, const Tensor /*cum_seq_q*/,
    const Tensor /*cum_seq_k*/, std::int64_t /*max_q*/, std::int64_t /*max_k*/, double code, bool /*is_causal*/,
    const Tensor /*philox_seed*/, const Tensor /*philox_offset*/, std::optional<double> scale) {
    return with_torch_errors([&] {
        return std::tuple_cat(node_backward(d_o, {q, k, v}, o, kept, code, scale), std::tuple(Tensor()));
    });
}

}  // namespace

void set_place(PlanOptions& options, TensorRef) {
    options.device = Device{};
    options.threads = torch_threads();
}

Execution execution_of(TensorRef) { return {.parallel_for = torch_parallel}; }

}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(aten, CPU, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_BOX(&tessera::torch_ops::fused_op));
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
           TORCH_BOX(&tessera::torch_ops::fused_backward_op));
}
