// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "ready_workers.hpp"

namespace tessera {
namespace {

/// Runs f in an arena of so many threads. The calling thread keeps its arena between calls, since its construction and
/// the arrival of workers take microseconds. While it is in use, a nested call with another number of threads makes its
/// own.
template <class F>
void in_arena_of(int threads, const F& f) {
    thread_local std::unique_ptr<tbb::task_arena> kept;
    std::unique_ptr<tbb::task_arena> arena = std::move(kept);
    if (arena == nullptr || arena->max_concurrency() != threads) arena = std::make_unique<tbb::task_arena>(threads);
    arena->execute(f);
    kept = std::move(arena);
}

}  // namespace

int available_threads() { return std::max(1, tbb::info::default_concurrency()); }

void default_parallel_for(std::int64_t tasks, int workers, const TaskBody& body) {
    const int used = static_cast<int>(std::min<std::int64_t>(workers, tasks));
    if (used <= 1) {
        for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
        return;
    }
    std::atomic<std::int64_t> next{0};
    std::exception_ptr error;
    std::once_flag first_error;
    const auto work = [&](int worker) {
        try {
            for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker);
        } catch (...) {
            next.store(
                tasks,
                std::memory_order_relaxed);  // ends the loops of the other workers: nobody will use their results
            std::call_once(first_error, [&] { error = std::current_exception(); });
        }
    };
    // More threads than oneTBB may have would make it print a warning.
    const auto allowed = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
    const int threads = std::min({used, available_threads(), static_cast<int>(allowed)});
    if (threads <= 1) {
        work(0);
    } else if (!run_on_ready_workers(threads, work)) {
        // Another call has the ready threads. The arena bounds the threads; each of its `used` loops is one worker,
        // wherever oneTBB runs it.
        in_arena_of(threads, [&] { tbb::parallel_for(0, used, work, tbb::simple_partitioner()); });
    }
    if (error) std::rethrow_exception(error);
}

}  // namespace tessera
