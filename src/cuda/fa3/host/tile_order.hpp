// SPDX-License-Identifier: Apache-2.0
//
// The order in which the tile scheduler hands out tiles of queries. Plain C++; tile_order_test models how it fills a
// GPU.
#pragma once

#include "cuda/host/divider.hpp"

namespace tessera::cuda::fa3 {

/// A tile of the order. A dense call counts the heads of all its sequences, a ragged one has the heads of one sequence
/// and counts the tiles of all sequences in each.
struct TileIndex {
    int head;   ///< index among the heads that the order counts
    int block;  ///< tile of queries of that head
};

/// All tiles of a call in launch order. Heads come in groups whose K and V fit in L2, one group after the other.
/// Within a group the heads alternate, from the last queries to the first: under a causal mask the longest tiles go
/// first, and short ones fill up the end.
class TileOrder {
 public:
    TileOrder() = default;
    TileOrder(int heads, int q_blocks, int heads_together)
        : heads_(heads),
          q_blocks_(q_blocks),
          group_(heads_together * q_blocks),
          together_(heads_together),
          last_group_((heads - 1) % heads_together + 1) {}

    TESSERA_HOST_DEVICE int q_blocks() const { return q_blocks_; }
    TESSERA_HOST_DEVICE int tiles() const { return heads_ * q_blocks_; }
    TESSERA_HOST_DEVICE TileIndex operator[](int index) const {
        return tile_of(index, group_.quotient(index), q_blocks_);
    }

    /// Likewise for a list of work (cuda/host/work_list.hpp), whose length only the device knows: `items` tiles a head.
    TESSERA_HOST_DEVICE int listed_tiles(int items) const { return heads_ * items; }
    TESSERA_HOST_DEVICE TileIndex listed(int index, int items) const {
        return tile_of(index, index / (together_.divisor() * items), items);
    }

 private:
    TESSERA_HOST_DEVICE TileIndex tile_of(int index, int group, int q_blocks) const {
        const int first_head = group * together_.divisor();
        const int within = index - first_head * q_blocks;
        // The last group may have fewer heads.
        const Divider& here = heads_ - first_head < together_.divisor() ? last_group_ : together_;
        const int row = here.quotient(within);
        return {first_head + within - row * here.divisor(), q_blocks - 1 - row};
    }

    int heads_ = 0;
    int q_blocks_ = 0;
    Divider group_, together_, last_group_;
};

/// The warpgroup's row block in a tile: 64 rows, M of a wgmma. The assignment rotates from tile to tile, because row
/// blocks differ in work: the last of a causal tile see more keys than the first, and those of a head's last tile may
/// be empty. `rotation` is below `warpgroups`.
TESSERA_HOST_DEVICE inline int row_block_of(int warpgroup, int rotation, int warpgroups) {
    const int row_block = warpgroup + rotation;
    return row_block < warpgroups ? row_block : row_block - warpgroups;
}
TESSERA_HOST_DEVICE inline int next_rotation(int rotation, int warpgroups) {
    return rotation + 1 < warpgroups ? rotation + 1 : 0;
}

}  // namespace tessera::cuda::fa3
