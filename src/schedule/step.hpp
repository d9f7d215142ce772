// SPDX-License-Identifier: Apache-2.0
//
// The step of a schedule: the bytes and FLOP of one tile operation, and sums of them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/cost.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::schedule {

/// One tile operation. The names are those of the papers' algorithms: Q_i is the tile of queries, K_j, V_j of keys.
enum class Operation : std::uint8_t {
    // forward
    load_q,         ///< Q_i to fast memory
    load_k,         ///< K_j
    load_v,         ///< V_j
    scores,         ///< S = Q_i K_j^T
    softmax,        ///< m and l with the new scores, P = exp(S - m)
    values,         ///< O_i += P V_j
    store_o,        ///< O_i / l_i and LSE_i to slow memory
    init_state,     ///< fa1: O_i, m_i, l_i = 0, -inf, 0 in slow memory
    load_state,     ///< fa1: O_i, m_i, l_i are read
    store_state,    ///< fa1: O_i, m_i, l_i are written back
    store_scores,   ///< standard: S goes to slow memory
    load_scores,    ///< standard: rows of S come back
    store_weights,  ///< standard: P goes to slow memory
    load_weights,   ///< standard: P comes back
    // backward
    row_dots,        ///< D_i = rowsum(dO_i * O_i); dQ_i = 0 in slow memory
    load_gradients,  ///< dO_i, LSE_i and D_i (fa1: O_i instead of D_i)
    weights_again,   ///< P = exp(S - LSE)
    dv_product,      ///< dV_j += P^T dO_i
    dp_product,      ///< dP = dO_i V_j^T, dS = P * (dP - D_i)
    dq_product,      ///< dQ_i += dS K_j
    dk_product,      ///< dK_j += dS^T Q_i
    add_dq,          ///< the sum of dQ_i in slow memory grows (fa1: read and written; fa2, fa3: added there)
    store_ds,        ///< standard: dS goes to slow memory
    load_ds,         ///< standard: dS comes back
    store_dkv,       ///< dK_j, dV_j to slow memory
    store_dq,        ///< dQ_i to slow memory in the Problem's dtype
};
const char* name_of(Operation operation);

using tessera::Bytes;
using tessera::Cost;
using tessera::Work;

/// Values of the algorithm that a step changes, as bits of Step::touches.
enum State : unsigned { kNothing = 0, kM = 1, kL = 2, kO = 4, kS = 8, kP = 16, kDq = 32, kDk = 64, kDv = 128 };

struct Step {
    Operation operation{};
    std::int64_t sequence = 0;    ///< index in the batch
    std::int64_t query_head = 0;  ///< within the sequence; the group's first head if a step serves the whole group
    Range queries{};              ///< empty if a step has none
    Range keys{};
    Coverage coverage = Coverage::full;
    unsigned touches = kNothing;  ///< bits of State
    Work work{};
};

/// The tensors that stay in the L2 until a later tile reads them again. This depends on the cache's size, which a
/// schedule does not know.
struct Residency {
    bool keys = true;                ///< K and V, after the first tile of queries that reads them
    bool queries = true;             ///< Q, O, dO, dQ and the per-query state (m, l, D), after the first tile of keys
    bool scores = false;             ///< the N x N matrices of `standard`
    std::int64_t tiles_at_once = 1;  ///< neighbours of the outer loop that run together share one read of what is not
                                     ///< resident
    friend bool operator==(const Residency&, const Residency&) = default;
};

/// The input of a schedule: a Problem with tile, pass and residency.
struct Workload {
    Problem problem{};
    Schedule schedule = Schedule::fa2;
    Pass pass = Pass::forward;
    Tile tile{};
    Residency residency{};
    /// (queries, keys) of each sequence of a ragged batch. Empty and ragged: sequences of equal lengths are assumed.
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences{};
};

}  // namespace tessera::schedule
