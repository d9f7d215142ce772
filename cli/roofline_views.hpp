// SPDX-License-Identifier: Apache-2.0
//
// Two views of `tessera roofline` that need no prediction: the contents of a tile near a core (--tile), and the steps
// of a schedule in time (--timeline).
#pragma once

#include <string>

#include "model/machine.hpp"
#include "schedule/schedule.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Lists the memories of a machine from the nearest on, with a tile's contents in each, and the largest tile that fits.
std::string tile_text(const schedule::Workload& workload, const model::Machine& machine, int width);
Json tile_json(const schedule::Workload& workload, const model::Machine& machine);

/// Shows one head on one core: a lane for each unit, and the steps. `workload` has one sequence and one head.
std::string timeline_text(const schedule::Workload& workload, const model::Machine& machine, int width);
Json timeline_json(const schedule::Workload& workload, const model::Machine& machine);

}  // namespace tessera::cli
