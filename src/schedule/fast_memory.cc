// SPDX-License-Identifier: Apache-2.0
#include "schedule/fast_memory.hpp"

#include <algorithm>

#include "schedule/emit.hpp"

namespace tessera::schedule {

FastMemory fast_memory(const Workload& w) {
    const Sizes z(w.problem);
    const std::int64_t queries = std::min(w.tile.block_q, w.problem.len_q);
    const std::int64_t keys = std::min(w.tile.block_kv, w.problem.len_kv);
    return {.q = queries * z.q,
            .k = keys * z.q,
            .v = keys * z.v,
            .scores = queries * keys * kSum,
            .o = queries * z.state()};
}

FastMemory fast_memory_of_whole_rows(const Workload& workload) {
    Workload w = workload;
    w.tile.block_kv = std::max<std::int64_t>(1, w.problem.len_kv);
    return fast_memory(w);
}

std::int64_t most_keys(const Workload& workload, std::int64_t bytes, std::int64_t copies, bool sums) {
    Workload w = workload;
    w.tile.block_kv = w.problem.len_kv = 1;
    const FastMemory of_one = fast_memory(w);
    const std::int64_t left = bytes - of_one.q - (sums ? of_one.o : 0);
    return std::max<std::int64_t>(0, left) / (copies * (of_one.k + of_one.v) + (sums ? of_one.scores : 0));
}

}  // namespace tessera::schedule
