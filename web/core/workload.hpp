// SPDX-License-Identifier: Apache-2.0
//
// Builds a workload of one head from a query of the page.
#pragma once

#include "documents.hpp"
#include "model/machine.hpp"
#include "schedule/schedule.hpp"

namespace tessera::web {

/// Reads {"len_q", "len_kv", "head_dim", "dtype", "causal": "none", "window": "128,0", "block_q", "block_kv"} for one
/// head and a batch of 1. Throws as Problem::validate() does, for tiles below 1 and for lengths above 2^20.
schedule::Workload workload_of(const Json& question, Schedule schedule, Pass pass);

/// Throws Error(invalid_argument) if the workload has more tiles than a page can play.
void expect_playable(const schedule::Workload& workload);

/// Reads "device". Throws Error(invalid_argument).
const model::Machine& machine_of(const Json& question);

Json json_of(const schedule::Work& work);
const char* name_of(Coverage coverage);

}  // namespace tessera::web
