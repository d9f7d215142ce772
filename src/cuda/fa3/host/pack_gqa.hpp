// SPDX-License-Identifier: Apache-2.0
//
// Query heads of a group as rows of one tile ("pack GQA" in FlashAttention-3's code). Plain C++: the model asks, too.
#pragma once

#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/host/query_tiles.hpp"

namespace tessera::cuda::fa3 {

/// So many heads, which share their K and V, stand in a tile together: row r is query r / heads of head r % heads. Few
/// queries then fill a tile, and K and V are read once for all of these heads. No bit of a row depends on it.
struct HeadStack {
    int shift = 0;  ///< log2 of the heads

    TESSERA_HOST_DEVICE int heads() const { return 1 << shift; }
    /// Of row `row` of a tile, from its first query and its first head.
    TESSERA_HOST_DEVICE int query(int row) const { return row >> shift; }
    TESSERA_HOST_DEVICE int head(int row) const { return row & (heads() - 1); }
};

/// A warp stores 16 rows at once: whole queries.
inline constexpr int kMostStacked = 16;

/// Tiles of a call.
inline std::int64_t tiles_of(const Problem& p, int block_q, HeadStack stack) {
    return saturating_product(query_heads(p) / stack.heads(), query_tiles(p, block_q / stack.heads()));
}

/// As many heads as their group, its powers of two and kMostStacked allow, where that saves a tenth of the tiles: long
/// rows fill their tiles without. Not where scores depend on their head (ALiBi, dropout).
inline HeadStack stack_of(const Problem& p) {
    const Config c = config_of(p);
    if (c.scores != Scores::plain && c.scores != Scores::capped) return {};
    HeadStack stack;
    while (2 * stack.heads() <= kMostStacked && p.group() % (2 * stack.heads()) == 0) ++stack.shift;
    return 10 * tiles_of(p, c.block_q(), stack) <= 9 * tiles_of(p, c.block_q(), {}) ? stack : HeadStack{};
}

}  // namespace tessera::cuda::fa3
