// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "tessera/attention.hpp"

namespace tessera::cli {

/// A progress bar on stderr. It appears only if stderr is a terminal and the work has passed a second, and erases
/// itself at the end. Its own thread draws it, so that one long call shows progress too.
class Progress {
 public:
    /// `steps` is the number of parts of the whole, each begun by step().
    explicit Progress(std::int64_t steps);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    /// Begins the next part; `label` describes it.
    void step(const std::string& label);

    /// expect() adds `tasks` parts to the current step; done() completes one of them.
    void expect(std::int64_t tasks) { tasks_ += tasks; }
    void done() { tasks_done_.fetch_add(1, std::memory_order_relaxed); }

    /// Returns tessera's own parallel loop, which counts its tasks as parts of the current step.
    ParallelFor counted_parallel_for();

 private:
    void draw_until_done();
    std::string line() const;

    const std::int64_t steps_;
    mutable std::mutex mutex_;
    std::condition_variable wake_;
    bool ended_ = false;
    std::int64_t begun_ = 0;
    std::string label_;
    std::atomic<std::int64_t> tasks_{0};
    std::atomic<std::int64_t> tasks_done_{0};
    std::thread drawer_;
};

/// Erases the bar if one is on the screen. Safe in a signal handler.
void clear_progress_line() noexcept;

/// Erases the bar and keeps it away while the lock is held, so that other text can be written.
std::unique_lock<std::mutex> terminal_without_progress();

}  // namespace tessera::cli
