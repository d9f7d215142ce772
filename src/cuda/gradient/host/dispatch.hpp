// SPDX-License-Identifier: Apache-2.0
//
// Chooses the compiled shape that runs a Problem.
#pragma once

#include <algorithm>

#include "cuda/gradient/host/config.h"
#include "cuda/host/scores.hpp"

namespace tessera::cuda::gradient {

/// Has a list a shape that is wide enough for the Problem?
template <class Shapes>
bool fits(const Problem& p) {
    return std::max(p.head_dim, p.head_dim_v) <= Shapes::kConfigs.back().head_dim;
}

/// The index of the first shape of a list that is wide enough for the Problem.
template <class Shapes>
std::size_t shape_index_by_dim(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const auto& c) { return dim <= c.head_dim; });
}

/// The head_dim of that shape, to which the Problem's are padded.
template <class Shapes>
int padded_dim(const Problem& p) {
    return Shapes::kConfigs[shape_index_by_dim<Shapes>(p)].head_dim;
}

/// The index of the first wide enough shape in a list that has a plain and a general shape of each width.
template <class Shapes>
std::size_t shape_index(const Problem& p, bool general) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const auto& c) { return c.general == general && dim <= c.head_dim; });
}
template <class Shapes>
std::size_t shape_index(const Problem& p) {
    return shape_index<Shapes>(p, changes_scores(p) || !scale_can_wait(p));
}

}  // namespace tessera::cuda::gradient
