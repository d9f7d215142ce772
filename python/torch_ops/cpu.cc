// SPDX-License-Identifier: Apache-2.0
//
// Calls on the CPU: kernels run on PyTorch's own threads, so they do not compete with its other operators for cores.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "call.hpp"

namespace tessera::torch_ops {
namespace {

int torch_threads() {
    std::uint32_t threads = 1;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    return static_cast<int>(std::clamp<std::uint32_t>(threads, 1, 1024));
}

/// One parallel loop: each worker takes the next task until none is left. PyTorch runs a nested loop on one thread,
/// which then gets the parts of several workers; the first part takes all tasks and the others find none.
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

}  // namespace

void set_device_and_threads(PlanOptions& options, TensorRef) {
    options.device = Device{};
    options.threads = torch_threads();
}

Execution execution_of(TensorRef) { return {.parallel_for = torch_parallel}; }

}  // namespace tessera::torch_ops
