// SPDX-License-Identifier: Apache-2.0
//
// What a schedule holds near a multiprocessor while it works on one tile: the reason why tiles have the size they have.
#pragma once

#include "schedule/step.hpp"

namespace tessera::schedule {

/// Bytes of one tile, once each: kernels that load ahead hold K and V twice or more.
struct NearMemory {
    std::int64_t q = 0;       ///< Q_i, in the Problem's dtype
    std::int64_t k = 0;       ///< K_j
    std::int64_t v = 0;       ///< V_j
    std::int64_t scores = 0;  ///< S = Q_i K_j^T in fp32, which becomes P
    std::int64_t o = 0;       ///< O_i in fp32, with m and l of its queries

    std::int64_t loaded() const { return q + k + v; }  ///< GPUs: shared memory
    std::int64_t sums() const { return scores + o; }   ///< GPUs: registers
    std::int64_t total() const { return loaded() + sums(); }
};

/// Of the forward. Tiles are cut at the Problem's lengths.
NearMemory near_memory(const Workload& workload);

/// The same where the softmax needs whole rows, as `standard` would without slow memory: a tile of queries with all
/// keys.
NearMemory near_memory_of_whole_rows(const Workload& workload);

/// Keys of the largest tile of the workload's queries whose Q_i and `copies` of K_j and V_j fit these bytes; `sums`: S
/// and O_i too. 0: none.
std::int64_t most_keys(const Workload& workload, std::int64_t bytes, std::int64_t copies, bool sums);

}  // namespace tessera::schedule
