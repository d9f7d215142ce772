// SPDX-License-Identifier: Apache-2.0
//
// Helpers of exercises and pictures: small problems, and sums over the steps of a schedule.
#pragma once

#include <initializer_list>

#include "measure/sweep.hpp"
#include "model/machine.hpp"
#include "schedule/schedule.hpp"
#include "walk/by_hand.hpp"

namespace tessera::learn {

inline constexpr double kKiB = 1024;
inline constexpr double kMiB = 1024 * kKiB;
inline constexpr double kGiB = 1024 * kMiB;

/// The GPU of the lessons.
const model::Machine& h200();

/// bf16, batch 1, all keys visible.
Problem problem_of(std::int64_t len, std::int64_t heads, std::int64_t head_dim);

/// A workload in which the L2 keeps no data between tiles, so that bytes are counted as in the papers: between slow and
/// fast memory.
schedule::Workload workload_of(const Problem& problem, Schedule schedule, Tile tile, Pass pass = Pass::forward);

/// The bytes of device memory that the operations move if the L2 holds only one head's K and V.
double dram_of(const Problem& problem, Schedule schedule, Tile tile,
               std::initializer_list<schedule::Operation> operations);

/// The bytes that the operations move between slow and fast memory, summed.
double bytes_of(const schedule::Workload& workload, std::initializer_list<schedule::Operation> operations);

/// The bytes that one tile of queries moves in `tessera walk --len 1024`: one head, head_dim 64, 4 bytes an element.
double walked_bytes(Schedule schedule, Tile tile);

/// The example by hand of all lessons: four queries and four keys, worked by fa2 without a mask.
walk::Hand pencil_example();

/// Walks one query (1, 0) over keys with these scores, `block` keys per tile.
walk::Hand stream_scores(const std::vector<std::int64_t>& scores, std::int64_t block);

/// Clocks of one inner tile of flash-attention's fa3 on an H200, 128 queries x 176 keys.
struct OverlapClocks {
    double gemms = 0;
    double exponentials = 0;
};
OverlapClocks overlap_clocks(int head_dim);

/// The prediction of a forward pass on a GPU, of the authors' kernel where there is one.
measure::SweepRow predicted(const model::Machine& machine, const Problem& problem, std::vector<Schedule> schedules);

/// The milliseconds of one schedule in predicted().
double predicted_ms(const model::Machine& machine, const Problem& problem, Schedule schedule);

}  // namespace tessera::learn
