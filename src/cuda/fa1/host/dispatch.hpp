// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem.
#pragma once

#include <algorithm>

#include "cuda/fa1/host/config.h"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa1 {

/// The index in Shapes; every legal Problem has a shape.
inline std::size_t shape_of(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const Config& c) { return c.general == changes_scores(p) && dim <= c.head_dim; });
}

inline Config config_of(const Problem& p) { return Shapes::kConfigs[shape_of(p)]; }

inline Tile tile_of(const Problem& p) {
    const Config c = config_of(p);
    return {c.block_q(), c.block_kv};
}

}  // namespace tessera::cuda::fa1
