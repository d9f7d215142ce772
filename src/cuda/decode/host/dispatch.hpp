// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem, and the sizes of a launch. Plain C++.
#pragma once

#include <algorithm>

#include "cuda/decode/host/config.h"
#include "cuda/host/query_tiles.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::decode {

/// Rows of a kv head of a sequence: its queries of the heads of a group.
inline std::int64_t rows_of(const Problem& p) { return saturating_product(p.len_q, p.group()); }

/// The index in Shapes of the shape with the fewest rows that are enough for a sequence, or else with the most rows.
/// Results do not depend on it.
inline std::size_t shape_of(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    std::size_t found = 0;
    for (std::size_t i = 0; i < Shapes::kConfigs.size(); ++i) {
        const Config& c = Shapes::kConfigs[i];
        if (dim > c.head_dim) continue;
        found = i;
        const bool last = i + 1 == Shapes::kConfigs.size() || Shapes::kConfigs[i + 1].head_dim != c.head_dim;
        if (rows_of(p) <= c.rows || last) break;
    }
    return found;
}
inline const Config& config_of(const Problem& p) { return Shapes::kConfigs[shape_of(p)]; }

inline Tile tile_of(const Problem& p) { return {config_of(p).rows, Config::kKeys}; }

/// Tiles of rows of a kv head of a sequence.
inline std::int64_t row_tiles(const Problem& p) { return (rows_of(p) + config_of(p).rows - 1) / config_of(p).rows; }

/// The most splits of a row. A cache has as many as its capacity may need.
inline int max_splits(const Problem& p) { return most_splits(static_cast<int>(p.len_kv)); }

/// The splits of a kv head of a sequence that has the Problem's lengths.
inline Items items_of(const Problem& p) {
    const Band32 band(p.mask.bind(p.len_q, p.len_kv));
    return {band, Span{0, static_cast<int>(p.len_q)}, static_cast<int>(p.len_kv), static_cast<int>(p.group()),
            config_of(p).rows};
}

/// The most bytes of partial results. 126 queries of 32 heads of 128 and a capacity of 131,072 keys would need more.
inline constexpr std::int64_t kMostPartialBytes = std::int64_t{512} << 20;

/// Queries, counted over all sequences, whose partial results are in memory at the same time. A call on a cache with
/// more of them launches the kernels several times. A row's bits do not depend on it.
inline std::int64_t queries_at_once(const Problem& p) {
    constexpr std::int64_t kMultiple = 16;  // fills tiles of 64 rows from four query heads a kv head on
    const std::int64_t bytes_of_split = config_of(p).head_dim * std::int64_t{sizeof(float)} + 2 * sizeof(float);
    const std::int64_t fitting =
        kMostPartialBytes / std::max<std::int64_t>(p.heads_q * max_splits(p) * bytes_of_split, 1);
    if (!p.kv_lengths || fitting >= p.rows_q()) return p.rows_q();
    return std::max<std::int64_t>(fitting > kMultiple ? fitting / kMultiple * kMultiple : fitting, 1);
}

/// The most splits of all rows.
inline std::int64_t most_items(const Problem& p) {
    const std::int64_t of_tile = std::max(max_splits(p), kMostMixedSplits);
    return saturating_product(saturating_product(saturating_product(p.batch, p.heads_kv), row_tiles(p)), of_tile);
}

}  // namespace tessera::cuda::decode
