// SPDX-License-Identifier: Apache-2.0
//
// Which compiled shape computes S (of head_dim), and which one O (of head_dim_v).
#pragma once

#include "cuda/standard/host/config.h"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::standard {

/// Its place in Shapes, for columns of Q and K, or of V.
constexpr std::size_t shape_of(std::int64_t dim) {
    return *Shapes::first([&](const Config& c) { return dim <= c.head_dim; });
}

inline Tile tile_of(const Problem&) { return {kBlockQ, kBlockKv}; }

}  // namespace tessera::cuda::standard
