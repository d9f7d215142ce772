// SPDX-License-Identifier: Apache-2.0
//
// What exercises and pictures share: their small problems, and sums over the steps of a schedule.
#pragma once

#include <initializer_list>

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

/// Nothing stays in the L2 between tiles, so that bytes are those of the papers: between slow and fast memory.
schedule::Workload workload_of(const Problem& problem, Schedule schedule, Tile tile, Pass pass = Pass::forward);

/// Bytes of device memory that the operations move when the L2 holds K and V of a head and nothing else is kept there.
double dram_of(const Problem& problem, Schedule schedule, Tile tile,
               std::initializer_list<schedule::Operation> operations);

/// Bytes that the operations move between slow and fast memory, all together.
double bytes_of(const schedule::Workload& workload, std::initializer_list<schedule::Operation> operations);

/// Four queries and four keys whose weights sum to powers of two, so that every fraction stays small.
walk::HandExample pencil_example();

/// One query (1, 0) and keys with these scores, a tile of `block` at a time.
walk::Hand stream_scores(const std::vector<std::int64_t>& scores, std::int64_t block);

}  // namespace tessera::learn
