// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem.
#pragma once

#include <algorithm>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/host/dispatch.hpp"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa2 {

/// The index in Shapes, in 16 bits; every legal Problem has a shape.
inline std::size_t shape_of(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    const bool general = changes_scores(p) || !scale_can_wait(p);
    return *Shapes::first([&](const Config& c) { return c.general == general && dim <= c.head_dim; });
}

/// The index in ShapesFp32.
inline std::size_t shape_of_fp32(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *ShapesFp32::first([&](const ConfigFp32& c) { return dim <= c.head_dim; });
}

inline Tile tile_of(const Problem& p) {
    if (p.dtype == DType::fp32) {
        const ConfigFp32 c = ShapesFp32::kConfigs[shape_of_fp32(p)];
        return {c.block, c.block};
    }
    const Config c = Shapes::kConfigs[shape_of(p)];
    return {c.block_q(), c.block_kv};
}

/// The shape of the backward, in 16 bits.
inline gradient::Config backward_config_of(const Problem& p) {
    return BackwardShapes::kConfigs[gradient::shape_index<BackwardShapes>(p)];
}

}  // namespace tessera::cuda::fa2
