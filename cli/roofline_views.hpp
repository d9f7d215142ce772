// SPDX-License-Identifier: Apache-2.0
//
// Two pictures of `tessera roofline` that need no prediction: the memory that a tile takes near a core (--tile), and
// the steps of a schedule in time (--timeline).
#pragma once

#include <string>

#include "model/machine.hpp"
#include "schedule/schedule.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The memories of a machine, nearest first, with a tile's bytes in each, and the largest tile that fits.
std::string tile_text(const schedule::Workload& workload, const model::Machine& machine, int width);
Json tile_json(const schedule::Workload& workload, const model::Machine& machine);

/// One head on one core: a lane for each unit, and the steps. `workload` must have one sequence and one head.
std::string timeline_text(const schedule::Workload& workload, const model::Machine& machine, int width);
Json timeline_json(const schedule::Workload& workload, const model::Machine& machine);

}  // namespace tessera::cli
