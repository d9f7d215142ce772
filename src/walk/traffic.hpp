// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tessera/observer.hpp"
#include "tessera/plan.hpp"

namespace tessera::walk {

/// Bytes between slow and fast memory for one tile of queries, as the papers count them: every matrix in the Problem's
/// dtype, m, l and LSE in fp32. K and V rows that are read once for all tiles of queries count in equal parts.
struct Traffic {
    double schedule = 0;  ///< the schedule at hand
    double standard = 0;  ///< standard attention over the same tiles: S and P (dP and dS) through slow memory
};

/// Counts the traffic of a tile of queries as the steps go by.
class TrafficCount {
 public:
    /// `queries`: of this tile. `query_tiles`: of the head.
    TrafficCount(const Plan& plan, std::int64_t queries, std::int64_t query_tiles);

    /// After the step.
    const Traffic& after(TileStep step, std::int64_t keys);

 private:
    void forward(TileStep step, double keys);
    void backward(TileStep step, double keys);

    Schedule schedule_;
    double element_;  ///< bytes
    double d_;        ///< bytes of a row of Q, K
    double dv_;       ///< bytes of a row of V, O
    double queries_;
    double share_;  ///< of what is read once for all tiles of queries
    bool begun_ = false;
    Traffic traffic_;
};

}  // namespace tessera::walk
