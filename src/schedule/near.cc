// SPDX-License-Identifier: Apache-2.0
#include "schedule/near.hpp"

#include <algorithm>

#include "schedule/emit.hpp"

namespace tessera::schedule {

NearMemory near_memory(const Workload& w) {
    const Sizes z(w.problem);
    const std::int64_t queries = std::min(w.tile.block_q, w.problem.len_q);
    const std::int64_t keys = std::min(w.tile.block_kv, w.problem.len_kv);
    return {.q = queries * z.q,
            .k = keys * z.q,
            .v = keys * z.v,
            .scores = queries * keys * kSum,
            .o = queries * z.state()};
}

NearMemory near_memory_of_whole_rows(const Workload& workload) {
    Workload w = workload;
    w.tile.block_kv = std::max<std::int64_t>(1, w.problem.len_kv);
    return near_memory(w);
}

}  // namespace tessera::schedule
