// SPDX-License-Identifier: Apache-2.0
//
// The tasks of a call of fa2 on a CPU, and their assignment to threads, from which the load imbalance follows. The
// loops are those of the kernels (cpu/fa2/work_split.hpp, cpu/fa2/matrix).
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "schedule/schedule.hpp"

namespace tessera::model {

/// The amounts that a task, or a call, computes. Its time is a sum over these.
struct Amounts {
    double flop = 0;
    double exps = 0;    ///< elements of S, counted each time they are computed
    double masked = 0;  ///< elements that go through a mask on a matrix unit
    double packed = 0;  ///< elements packed into tiles, and elements of O stored from them

    Amounts& operator+=(const Amounts& other);
};

/// Clocks of a task.
using Cost = std::function<double(const Amounts&)>;

/// A parallel loop of a call, with tasks in starting order.
struct Loop {
    std::vector<Amounts> tasks;
    /// The backward's stripes (cpu/fa2/matrix/stripes.hpp): [head][stripe][block of keys]. Each block waits for its
    /// stripe's previous block, and for the previous stripe to take the same block. `tasks` is then empty.
    std::vector<std::vector<std::vector<Amounts>>> stripes;
    bool even = false;  ///< tasks are so small that all threads end at the same time; `tasks` holds their sum

    Amounts sum() const;
    /// Clocks until the last of `threads` threads is done.
    double done(int threads, const Cost& cost) const;
};

/// The settings that determine the kernels' tasks.
struct CpuWorkSplit {
    int threads = 1;
    bool on_matrix_unit = false;
    int parts = 1;  ///< bf16 parts of an element on a matrix unit
};

/// The loops of fa2's call; empty if tasks are so many that each thread gets an even share.
std::vector<Loop> loops_of(const schedule::Workload& workload, const CpuWorkSplit& work_split);
std::vector<Loop> forward_loops(const schedule::Workload& workload, const CpuWorkSplit& work_split);
std::vector<Loop> backward_loops(const schedule::Workload& workload, const CpuWorkSplit& work_split);
inline constexpr double kMostTasks = 1 << 16;

using Lengths = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// (queries, keys) of each sequence.
Lengths lengths_of(const schedule::Workload& workload);

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
constexpr Range overlap(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

}  // namespace tessera::model
