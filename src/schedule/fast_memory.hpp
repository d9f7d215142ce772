// SPDX-License-Identifier: Apache-2.0
//
// The fast memory (shared memory and registers) that a schedule needs for one tile; it bounds the tile size.
#pragma once

#include "schedule/step.hpp"

namespace tessera::schedule {

/// Bytes of one tile, once each: kernels that load ahead hold K and V twice or more.
struct FastMemory {
    std::int64_t q = 0;       ///< Q_i, in the Problem's dtype
    std::int64_t k = 0;       ///< K_j
    std::int64_t v = 0;       ///< V_j
    std::int64_t scores = 0;  ///< S = Q_i K_j^T in fp32, which becomes P
    std::int64_t o = 0;       ///< O_i in fp32, with m and l of its queries

    std::int64_t loaded() const { return q + k + v; }  ///< GPUs: shared memory
    std::int64_t sums() const { return scores + o; }   ///< GPUs: registers
    std::int64_t total() const { return loaded() + sums(); }
};

/// The fast memory of the forward. Tiles are cut at the Problem's lengths.
FastMemory fast_memory(const Workload& workload);

/// The fast memory if S and P of whole rows stayed in it: a tile of queries with all keys.
FastMemory fast_memory_of_whole_rows(const Workload& workload);

/// The largest number of keys of a tile such that, with the workload's queries, Q_i and `copies` of K_j and V_j fit
/// these bytes. `sums`: S and O_i must fit too. 0: none.
std::int64_t most_keys(const Workload& workload, std::int64_t bytes, std::int64_t copies, bool sums);

}  // namespace tessera::schedule
