// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tessera/attention.hpp"

namespace llama {

/// The threads of the program. The linear layers and, by Execution::parallel_for, the attention run on the same ones.
class Threads {
 public:
    /// 0, or more than the process may use: as many as it may use.
    explicit Threads(int count) : arena_(count > 0 ? std::min(count, available()) : available()) {}

    int count() const { return arena_.max_concurrency(); }

    /// Runs body(task, worker) for every task in [0, tasks). This is a tessera::ParallelFor.
    void run(std::int64_t tasks, int workers, const tessera::TaskBody& body) {
        workers = static_cast<int>(std::min<std::int64_t>({tasks, workers, count()}));
        if (workers <= 1) {
            for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
            return;
        }
        std::atomic<std::int64_t> next{0};
        const auto work = [&](int worker) {
            for (std::int64_t task = next++; task < tasks; task = next++) body(task, worker);
        };
        arena_.execute([&] { tbb::parallel_for(0, workers, work, tbb::simple_partitioner()); });
    }

 private:
    static int available() { return tbb::info::default_concurrency(); }

    tbb::task_arena arena_;
};

}  // namespace llama
