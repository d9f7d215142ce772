// SPDX-License-Identifier: Apache-2.0
//
// The order in which tiles of queries are worked on. Plain C++: tests/cuda_host/tile_order_test.cc models how it fills
// a GPU.
#pragma once

#include "cuda/host/divider.hpp"

namespace tessera::cuda::fa3 {

/// A head is here one of a sequence's, of a ragged call one of all sequences'.
struct TilePlace {
    int head;   ///< of all heads of the call
    int block;  ///< tile of queries of that head
};

/// All tiles of a call: groups of heads whose K and V stay in L2 together, one group after the other; within one, from
/// the last queries to the first, the heads mixed. Under a causal mask the longest tiles then go first, and short ones
/// fill up.
class TileOrder {
 public:
    TileOrder() = default;
    TileOrder(int heads, int q_blocks, int heads_together)
        : heads_(heads),
          q_blocks_(q_blocks),
          group_(heads_together * q_blocks),
          together_(heads_together),
          rest_((heads - 1) % heads_together + 1) {}

    TESSERA_HOST_DEVICE int tiles() const { return heads_ * q_blocks_; }
    TESSERA_HOST_DEVICE TilePlace operator[](int index) const {
        const int group = group_.quotient(index);
        const int within = index - group * group_.divisor();
        const int first_head = group * together_.divisor();
        // The last group has what heads are left.
        const Divider& here = heads_ - first_head < together_.divisor() ? rest_ : together_;
        const int row = here.quotient(within);
        return {first_head + within - row * here.divisor(), q_blocks_ - 1 - row};
    }

 private:
    int heads_ = 0;
    int q_blocks_ = 0;
    Divider group_, together_, rest_;
};

/// Slices of 64 rows of a tile, one for each of `warpgroups`. They go round from tile to tile, `rotation` counts up
/// to `warpgroups`: the last slices of a causal tile see more keys than the first, those of a row's last tile have no
/// rows.
TESSERA_HOST_DEVICE inline int slice_of(int warpgroup, int rotation, int warpgroups) {
    const int slice = warpgroup + rotation;
    return slice < warpgroups ? slice : slice - warpgroups;
}
TESSERA_HOST_DEVICE inline int next_rotation(int rotation, int warpgroups) {
    return rotation + 1 < warpgroups ? rotation + 1 : 0;
}

}  // namespace tessera::cuda::fa3
