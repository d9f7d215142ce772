// SPDX-License-Identifier: Apache-2.0
//
// A workload of one head from a question of the page.
#pragma once

#include "documents.hpp"
#include "model/machine.hpp"
#include "schedule/schedule.hpp"

namespace tessera::web {

/// {"len_q", "len_kv", "head_dim", "dtype", "causal": "none", "window": "128,0", "block_q", "block_kv"}, one head of
/// one batch member. Throws as Problem::validate(); tiles of at least 1 and lengths of at most 2^20.
schedule::Workload workload_of(const Json& question, Schedule schedule, Pass pass);

/// Throws Error(invalid_argument) when the workload has more tiles than a page can play.
void expect_playable(const schedule::Workload& workload);

/// "device". Throws Error(invalid_argument).
const model::Machine& machine_of(const Json& question);

Json json_of(const schedule::Work& work);
const char* name_of(Coverage coverage);

}  // namespace tessera::web
