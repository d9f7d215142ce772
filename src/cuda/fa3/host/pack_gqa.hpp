// SPDX-License-Identifier: Apache-2.0
//
// PackGQA: query heads of a GQA group as rows of one tile. Plain C++, which the cost model calls too.
#pragma once

#include <bit>

#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/host/query_tiles.hpp"

namespace tessera::cuda::fa3 {

/// The number of query heads of a group in one tile: row r of the tile is query r / heads of head r % heads. Few
/// queries then fill a tile, and K and V are read once for all of these heads. No bit of a row depends on it.
struct PackGqa {
    int shift = 0;  ///< log2 of the heads

    TESSERA_HOST_DEVICE int heads() const { return 1 << shift; }
    /// Query of a row, counted from the tile's first query.
    TESSERA_HOST_DEVICE int query(int row) const { return row >> shift; }
    /// Head of a row, counted from the tile's first head.
    TESSERA_HOST_DEVICE int head(int row) const { return row & (heads() - 1); }
};

/// Tiles of a call.
inline std::int64_t tiles_of(const Problem& p, int block_q, PackGqa pack) {
    return saturating_product(query_heads(p) / pack.heads(), query_tiles(p, block_q / pack.heads()));
}

/// The packing of a call: the largest power of two that divides the group, if it saves a tenth of the tiles. Long
/// rows fill their tiles without packing. Scores that depend on their head (ALiBi, dropout) are not packed.
inline PackGqa pack_gqa_of(const Problem& p) {
    const Config c = config_of(p);
    if (c.scores != Scores::plain && c.scores != Scores::capped) return {};
    const PackGqa pack{std::countr_zero(static_cast<unsigned>(most_packed_heads(p)))};
    return 10 * tiles_of(p, c.block_q(), pack) <= 9 * tiles_of(p, c.block_q(), {}) ? pack : PackGqa{};
}

/// Tiles of a head, of all sequences if the call is ragged: the most that its rows can need.
inline std::int64_t tiles_of_head(const Problem& p) {
    return query_tiles(p, config_of(p).block_q() / pack_gqa_of(p).heads());
}

}  // namespace tessera::cuda::fa3
