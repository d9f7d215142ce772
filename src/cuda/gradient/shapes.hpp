// SPDX-License-Identifier: Apache-2.0
//
// Which compiled shape runs a Problem.
#pragma once

#include <algorithm>

#include "cuda/gradient/config.h"
#include "cuda/shared/scores.hpp"

namespace tessera::cuda::gradient {

/// The place in a list of compiled shapes of the first one that holds a Problem in 16 bits.
template <class Shapes>
std::size_t place_in(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    const bool general = changes_scores(p) || !scale_can_wait(p);
    return *Shapes::first([&](const auto& c) { return c.general == general && dim <= c.head_dim; });
}

/// The same in fp32.
template <class ShapesFp32>
std::size_t place_in_fp32(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *ShapesFp32::first([&](const auto& c) { return dim <= c.head_dim; });
}

}  // namespace tessera::cuda::gradient
