// SPDX-License-Identifier: Apache-2.0
//
// The tasks of a loop over heads. In a ragged call, and on a cache, each sequence's own lengths determine its tasks.
// The Problem states only upper bounds, which may be a thousand times larger.
#pragma once

#include <algorithm>

#include "core/arena.hpp"
#include "core/batch.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cpu {

/// Sequence `batch` of a call.
template <class Args>
Sequence sequence_of(const Call<Args>& call, std::int64_t batch) {
    return tessera::sequence_of(call.plan.problem, call.args, batch);
}

/// Memory of a HeadTasks; consecutive loops may share it.
inline std::int64_t* take_task_ends(Arena& arena, const Problem& p) {
    return arena.take<std::int64_t>(own_lengths(p) ? p.batch : 0);
}

/// Task `index` of the `tasks` of a head; `head` counts over all sequences.
struct HeadTask {
    std::int64_t head;
    std::int64_t index;
    std::int64_t tasks;
};

/// The number of tasks of every head, and the mapping from task numbers to heads.
class HeadTasks {
 public:
    /// tasks_of(sequence): tasks of each of the sequence's heads. ends: take_task_ends()
    template <class Args, class TasksOf>
    HeadTasks(const Call<Args>& call, std::int64_t heads_per_sequence, std::int64_t* ends, const TasksOf& tasks_of)
        : own_lengths_(own_lengths(call.plan.problem)),
          batch_(call.plan.problem.batch),
          heads_(own_lengths_ ? heads_per_sequence : batch_ * heads_per_sequence),
          ends_(ends) {
        if (!own_lengths_ && heads_ > 0) total_ = heads_ * tasks_of(sequence_of(call, 0));
        for (std::int64_t b = 0; own_lengths_ && b < batch_; ++b) {
            total_ += heads_ * tasks_of(sequence_of(call, b));
            ends_[b] = total_;
        }
    }

    std::int64_t total() const { return total_; }

    /// Numbers all tasks of a head in a row, head by head.
    HeadTask by_head(std::int64_t task) const {
        const Run run = run_of(task);
        return {run.first_head + run.task / run.tasks, run.task % run.tasks, run.tasks};
    }
    /// Numbers the first tasks of all heads of a Run, then their second tasks.
    HeadTask by_index(std::int64_t task) const {
        const Run run = run_of(task);
        return {run.first_head + run.task % heads_, run.task / heads_, run.tasks};
    }

 private:
    /// Heads with the same number of tasks: those of one sequence with its own lengths, or of a dense call.
    struct Run {
        std::int64_t first_head;
        std::int64_t task;   ///< task number within the run
        std::int64_t tasks;  ///< tasks of each head
    };
    Run run_of(std::int64_t task) const {
        if (!own_lengths_) return {0, task, total_ / heads_};
        const std::int64_t b = std::upper_bound(ends_, ends_ + batch_, task) - ends_;
        const std::int64_t begin = b == 0 ? 0 : ends_[b - 1];
        return {b * heads_, task - begin, (ends_[b] - begin) / heads_};
    }

    bool own_lengths_;
    std::int64_t batch_;
    std::int64_t heads_;  ///< heads of a sequence, or of a dense call
    std::int64_t* ends_;  // [batch]: one past the last task of each sequence with its own lengths
    std::int64_t total_ = 0;
};

}  // namespace tessera::cpu
