// SPDX-License-Identifier: Apache-2.0
//
// Chooses the compiled shape of the forward for a Problem, and whether its tile scheduler is dynamic. Plain C++, which
// the cost model calls too. Figures are of an H200; fa3/TRIED.md has the tables behind them.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>

#include "cuda/fa3/host/forward_config.h"
#include "cuda/fa3/host/makespan.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/host/scores.hpp"
#include "cuda/host/typical_keys.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa3 {

/// Do the tiles of a call take different times?
inline bool uneven(const Problem& p) { return p.ragged || p.kv_lengths || !p.mask.trivial(); }

/// The score modification of a Problem.
inline Scores scores_of(const Problem& p) {
    if (p.alibi && !p.bias && p.softcap <= 0 && p.dropout.probability <= 0) return Scores::alibi;
    if (p.bias && !p.alibi && p.softcap <= 0 && p.dropout.probability <= 0) return Scores::bias;
    if (p.alibi || p.bias || !scale_can_wait(p)) return Scores::general;
    if (p.dropout.probability > 0) return p.softcap > 0 ? Scores::general : Scores::dropout;
    if (p.softcap <= 0) return Scores::plain;
    const auto scale = static_cast<float>(p.effective_scale());
    return fits(softcap_of(p.softcap, scale)) ? Scores::capped : Scores::general;
}

/// Tiles of HeadDim64 and HeadDim64Short in long rows. Fitted to three causal heads of 8,192 keys, where the longest
/// tile decides: 102 and 76 microseconds.
inline constexpr TileCost kTileOf192{HeadDim64::kConfig.block_q(), 1.5, 2.5};
inline constexpr TileCost kTileOf128{HeadDim64Short::kConfig.block_q(), 1.1, 1.5};

/// These tiles in short rows, and the time of a call besides its tiles. Fitted to 91 calls of 64 to 1,024 keys and
/// up to five rounds of tiles of 192 queries, judged by 79 others.
inline constexpr TileCost kShortTileOf192{HeadDim64::kConfig.block_q(), 1.55, 1.95};
inline constexpr TileCost kShortTileOf128{HeadDim64Short::kConfig.block_q(), 1.20, 0.82};
inline constexpr double kShortCall = 9;

/// Is a short row faster with tiles of 192 queries? Calls of few tiles go by their makespans, where 192 must win
/// clearly. Other calls need 192 to save more than a quarter of the tiles: one of its tiles takes 1.30 to 1.36 times as
/// long as one of 128 (rows of 300 to 16,384 keys).
inline bool wants_fewer_tiles(const Problem& p) {
    constexpr double kClearly = 1.05;
    constexpr int kMostRounds = 5;
    if (p.ragged || p.mask.window_left != unbounded || query_heads(p) == 0 || p.len_q == 0) return false;  // unmeasured
    const std::int64_t few = query_tiles(p, kShortTileOf192.queries);
    const std::int64_t many = query_tiles(p, kShortTileOf128.queries);
    const std::int64_t tiles = saturating_product(query_heads(p), few);
    const bool may_pack = p.group() > 1 && p.len_q <= 512;  // PackGQA changes the number of tiles
    if (may_pack || tiles > kMostRounds * kMultiprocessors) return 4 * few < 3 * many && tiles > 2 * kMultiprocessors;
    return kShortCall + makespan(p, kShortTileOf128) >= kClearly * (kShortCall + makespan(p, kShortTileOf192));
}

/// If a call fits both HeadDim64 and HeadDim64Short, is HeadDim64Short chosen? It is for most short rows, and for long
/// rows of few heads if it clearly keeps the multiprocessors busier. No bit depends on it.
inline bool wants_short(const Problem& p) {
    constexpr Config kShort = HeadDim64Short::kConfig;
    constexpr double kClearly = 0.9;  // a margin for the error of the two costs
    if (p.sinks && !HeadDim64::kConfig.takes_sinks()) return true;
    if (typical_keys(p) <= (uneven(p) ? kShort.short_row : kShort.short_even_row)) return !wants_fewer_tiles(p);
    return makespan_decides(p, kTileOf192) && makespan(p, kTileOf128) < kClearly * makespan(p, kTileOf192);
}

/// Most heads of a tile: a warp stores 16 rows at a time, which have to be whole queries.
inline constexpr int kMaxPackedHeads = 16;

/// Query heads of a group that PackGQA can put into a tile: the largest power of two that divides the group.
inline int most_packed_heads(const Problem& p) {
    int heads = 1;
    while (2 * heads <= kMaxPackedHeads && p.group() % (2 * heads) == 0) heads *= 2;
    return heads;
}

/// Are the rows of a sequence so few that tiles of 64 are faster? They are in packed documents that are short in the
/// mean, where tiles of 128 are mostly empty, and in dense calls whose sequences fit into one tile.
inline bool wants_small_tiles(const Problem& p, const Config& c) {
    const std::int64_t packed = most_packed_heads(p);
    if (!p.ragged) return p.len_q * packed <= c.block_q() && p.len_kv <= c.block_kv;
    return typical_keys(p) * packed <= c.small_rows;
}

/// Index in Shapes of the first shape that holds a Problem with such scores, or none: shapes with score modifications
/// end at a smaller head_dim.
inline std::optional<std::size_t> shape_of(const Problem& p, Scores scores) {
    return Shapes::first([&](const Config& c) {
        return c.scores == scores && c.cached == p.kv_lengths && p.head_dim <= c.head_dim &&
               p.head_dim_v <= c.head_dim_v && (c.short_row == 0 || wants_short(p)) &&
               (c.small_rows == 0 || wants_small_tiles(p, c)) && !(c.masked_only && p.mask.trivial());
    });
}
inline std::optional<std::size_t> shape_of(const Problem& p) { return shape_of(p, scores_of(p)); }

/// The largest head_dim of shapes for such scores.
constexpr std::int64_t largest_dim(Scores scores) {
    std::int64_t largest = 0;
    for (const Config& c : Shapes::kConfigs) {
        if (c.scores == scores) largest = std::max<std::int64_t>(largest, c.head_dim);
    }
    return largest;
}

/// The Config of a Problem's shape. A Problem that no shape holds gets the shape of plain scores: the cost model asks
/// about those, too.
inline Config config_of(const Problem& p) {
    const std::optional<std::size_t> own = shape_of(p);
    return Shapes::kConfigs[own ? *own : *shape_of(p, Scores::plain)];
}

/// Rows of a TMA box that loads keys from pages: the most that divide a page and a block of keys.
inline int page_rows(const Problem& p, const Config& c) {
    return static_cast<int>(std::gcd(p.page_size, std::int64_t{c.block_kv}));
}

inline Tile tile_of(const Problem& p) {
    const Config c = config_of(p);
    return {c.block_q(), c.block_kv};
}

/// Does a dynamic tile scheduler take the tiles of a call from a list?
inline bool has_list(const Problem& p) { return p.ragged && config_of(p).takes_list(); }

/// Is the persistent tile scheduler dynamic, with a counter in the workspace? That costs a launch. It pays if tiles
/// take different times and do not all run at once. With skips_blocks() a row's last tile is shorter even without a
/// mask. PackGQA makes no more tiles than are counted here.
inline bool dynamic_scheduling(const Problem& p, std::int64_t multiprocessors) {
    const Config c = config_of(p);
    return (uneven(p) || c.skips_blocks()) &&
           saturating_product(query_heads(p), query_tiles(p, c.block_q())) > c.ctas * multiprocessors;
}

}  // namespace tessera::cuda::fa3
