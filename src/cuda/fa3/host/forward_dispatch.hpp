// SPDX-License-Identifier: Apache-2.0
//
// Which compiled shape runs a Problem.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/fa3/host/forward_config.h"
#include "cuda/fa3/host/makespan.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa3 {

/// Do tiles take different times?
inline bool uneven(const Problem& p) { return p.ragged || !p.mask.trivial(); }

/// What the scores of a problem go through besides scale and mask.
inline Scores scores_of(const Problem& p) {
    if (p.alibi && !p.bias && p.softcap <= 0 && p.dropout.probability <= 0) return Scores::alibi;
    if (p.alibi || p.bias || !scale_can_wait(p)) return Scores::general;
    if (p.dropout.probability > 0) return p.softcap > 0 ? Scores::general : Scores::dropout;
    if (p.softcap <= 0) return Scores::plain;
    const auto scale = static_cast<float>(p.effective_scale());
    return fits(cap_of(p.softcap, scale)) ? Scores::capped : Scores::general;
}

/// Of tiles of HeadDim64 and HeadDim64Short in long rows. From three causal heads of 8,192 keys on an H200, whose
/// longest tile decides: 102 and 76 microseconds. (Sixteen calls of one to sixteen heads of 2,048 to 32,768 keys later
/// gave 1.54 and 1.13 for a block; the model chose the faster tile in each.)
inline constexpr TilePrice kTileOf192{HeadDim64::kConfig.block_q(), 1.5, 2.5};
inline constexpr TilePrice kTileOf128{HeadDim64Short::kConfig.block_q(), 1.1, 1.5};

/// The same in short rows, and what a call takes besides: fitted to 91 calls on an H200 of 64 to 1,024 keys and up to
/// five rounds of tiles of 192 queries, and judged by 79 others (TRIED.md).
inline constexpr TilePrice kShortTileOf192{HeadDim64::kConfig.block_q(), 1.55, 1.95};
inline constexpr TilePrice kShortTileOf128{HeadDim64Short::kConfig.block_q(), 1.20, 0.82};
inline constexpr double kShortCall = 9;

/// Does a short row take less time by tiles of 192 queries? Of few tiles by their prices, where 192 must win clearly.
/// Otherwise those of 192 must be so much fewer: one of them takes 1.30 to 1.36 times as long as one of 128, as
/// measured in rows of 300 to 16,384 keys.
inline bool wants_fewer_tiles(const Problem& p) {
    constexpr double kClearly = 1.05;
    constexpr int kMostRounds = 5;
    if (p.ragged || p.mask.window_left != unbounded || query_heads(p) == 0 || p.len_q == 0) return false;  // unmeasured
    const std::int64_t few = query_tiles(p, kShortTileOf192.queries);
    const std::int64_t many = query_tiles(p, kShortTileOf128.queries);
    const std::int64_t tiles = saturating_product(query_heads(p), few);
    const bool stacked = p.group() > 1 && p.len_q <= 512;  // maybe
    if (stacked || tiles > kMostRounds * kMultiprocessors) return 4 * few < 3 * many && tiles > 2 * kMultiprocessors;
    return kShortCall + queue_time(p, kShortTileOf128) >= kClearly * (kShortCall + queue_time(p, kShortTileOf192));
}

/// Does a call that both HeadDim64 and HeadDim64Short hold get the latter? Most short rows do; long ones of few heads,
/// where that clearly keeps the multiprocessors busier. No bit depends on it.
inline bool wants_short(const Problem& p) {
    constexpr Config kShort = HeadDim64Short::kConfig;
    constexpr double kClearly = 0.9;  // the prices were not measured by themselves
    if (p.len_kv <= (uneven(p) ? kShort.short_row : kShort.short_even_row)) return !wants_fewer_tiles(p);
    return queue_decides(p, kTileOf192) && queue_time(p, kTileOf128) < kClearly * queue_time(p, kTileOf192);
}

/// Is a call worked on by pairs of thread blocks, where such a shape holds it? Rows without a mask, whose tiles all see
/// the same keys; where a row's tiles are odd, and the last one's place beside it stays empty, only if that costs no
/// round. Measured: as long as single ones at 2,048 keys, 0.96 to 0.97 of their time at 16,384, by the clock, which is
/// higher where less comes from L2.
inline bool wants_pairs(const Problem& p, const Config& c) {
    constexpr std::int64_t kLongRow = 2048;
    constexpr std::int64_t kPairs = kMultiprocessors / 2;
    if (uneven(p) || p.len_q < kLongRow || p.len_kv < kLongRow || query_heads(p) == 0) return false;
    const std::int64_t tiles = query_tiles(p, c.block_q());
    const auto rounds = [&](std::int64_t of_head, std::int64_t at_once) {
        return (saturating_product(query_heads(p), of_head) - 1) / at_once;
    };
    return rounds((tiles + 1) / 2, kPairs) <= rounds(tiles, 2 * kPairs);
}

/// And by pairs of heads? Causal rows, of heads of which two share K and V, where every query sees keys. Measured: 1.00
/// to 1.06 of the time of single ones at 2,048 and 4,096 keys, 0.96 to 0.98 from 8,192 on.
inline bool wants_pairs_of_heads(const Problem& p) {
    constexpr std::int64_t kLongRow = 8192;
    const bool causal = p.mask.causal != Causal::none && p.mask.window_left == unbounded;
    return causal && !p.ragged && p.group() % 2 == 0 && p.len_q >= kLongRow && p.len_kv >= p.len_q &&
           query_heads(p) > 0 && p.mask.bind(p.len_q, p.len_kv).high >= 0;
}

/// The place in Shapes of the first one that holds a Problem with such scores; none: they go up to a smaller head_dim.
inline std::optional<std::size_t> shape_of(const Problem& p, Scores scores) {
    return Shapes::first([&](const Config& c) {
        return c.scores == scores && p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim_v &&
               (c.short_row == 0 || wants_short(p)) && !(c.masked_only && p.mask.trivial()) &&
               (!c.pairs || (c.pairs_of_heads ? wants_pairs_of_heads(p) : wants_pairs(p, c)));
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

/// Of a Problem that no shape holds, the shape that it would have if scores were only scaled: the model asks about
/// those, too.
inline Config config_of(const Problem& p) {
    const std::optional<std::size_t> own = shape_of(p);
    return Shapes::kConfigs[own ? *own : *shape_of(p, Scores::plain)];
}

inline Tile tile_of(const Problem& p) {
    const Config c = config_of(p);
    return {c.block_q(), c.block_kv};
}

/// Whether tiles go to whoever is free, by a counter in the workspace, which costs a launch: some take longer than
/// others (without a mask a row's last one, where a warpgroup skips what is not its own), and there are more of
/// them than blocks run at once. (Stacked heads make no more tiles.)
inline bool by_counter(const Problem& p, std::int64_t multiprocessors) {
    const Config c = config_of(p);
    return (uneven(p) || c.skips_blocks()) &&
           saturating_product(query_heads(p), query_tiles(p, c.block_q())) > multiprocessors;
}

}  // namespace tessera::cuda::fa3
