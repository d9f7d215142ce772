// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem, and the sizes of a launch.
#pragma once

#include <algorithm>

#include "cuda/decode/host/config.h"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::decode {

/// The index in Shapes; every legal Problem has a shape.
inline std::size_t shape_of(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const Config& c) { return dim <= c.head_dim; });
}

inline Tile tile_of(const Problem&) { return {kMaxQueries, Config::kKeys}; }

/// CTAs that share the query heads of a group.
inline std::int64_t head_tiles(const Problem& p) { return (p.group() + kHeadsOfTile - 1) / kHeadsOfTile; }

/// The most splits of a sequence of the call.
inline std::int64_t max_splits(const Problem& p) {
    if (p.ragged) return max_splits(p.len_kv);
    return Splits(p.mask.bind(p.len_q, p.len_kv).kv_range(0, p.len_q)).count;
}

}  // namespace tessera::cuda::decode
