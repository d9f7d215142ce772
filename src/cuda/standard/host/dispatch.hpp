// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that computes S (by head_dim), and the one that computes O (by head_dim_v).
#pragma once

#include "cuda/standard/host/config.h"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::standard {

/// The index in Shapes for `dim` columns of Q and K, or of V.
constexpr std::size_t shape_of(std::int64_t dim) {
    return *Shapes::first([&](const Config& c) { return dim <= c.head_dim; });
}

inline Tile tile_of(const Problem&) { return {kBlockQ, kBlockKv}; }

}  // namespace tessera::cuda::standard
