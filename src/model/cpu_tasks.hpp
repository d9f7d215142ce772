// SPDX-License-Identifier: Apache-2.0
//
// The tasks that fa2 cuts a call into on a CPU, and who gets them: how much later than an even share the last thread is
// done. Loop by loop as the kernels have them (cpu/fa2/work_split.hpp, cpu/fa2/matrix).
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "schedule/schedule.hpp"

namespace tessera::model {

/// What a task, or a call, computes. Its time is a sum over these.
struct Amounts {
    double flop = 0;
    double exps = 0;    ///< elements of S, as often as they are made
    double masked = 0;  ///< those of them that go through a mask on a matrix unit
    double packed = 0;  ///< elements of tensors that are put into tiles, and of O that come out of them

    Amounts& operator+=(const Amounts& other);
};

/// Clocks of a task.
using Cost = std::function<double(const Amounts&)>;

/// A loop of a call. Tasks in the order in which they begin; those of a chain one after the other.
struct Loop {
    std::vector<Amounts> tasks;
    /// The backward's stripes (cpu/fa2/matrix/stripes.hpp): [head][stripe][block of keys], each after the block before
    /// it and after the stripe before it has taken that block; `tasks` is empty then.
    std::vector<std::vector<std::vector<Amounts>>> stripes;
    bool even = false;  ///< tasks so small that all threads are done at once: `tasks` has their sum

    Amounts sum() const;
    /// Clocks until the last of so many threads is done.
    double done(int threads, const Cost& cost) const;
};

/// What the kernels go by.
struct CpuDeal {
    int threads = 1;
    bool on_matrix_unit = false;
    int parts = 1;  ///< of an element, on a matrix unit
};

/// The loops of fa2's call; nothing where there are so many tasks that an even share is what each thread gets.
std::vector<Loop> loops_of(const schedule::Workload& workload, const CpuDeal& deal);
std::vector<Loop> forward_loops(const schedule::Workload& workload, const CpuDeal& deal);
std::vector<Loop> backward_loops(const schedule::Workload& workload, const CpuDeal& deal);
inline constexpr double kMostTasks = 1 << 16;

using Lengths = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// (queries, keys) of each sequence.
Lengths lengths_of(const schedule::Workload& workload);

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
constexpr Range overlap(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

}  // namespace tessera::model
