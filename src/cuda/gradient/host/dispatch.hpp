// SPDX-License-Identifier: Apache-2.0
//
// Which compiled shape runs a Problem.
#pragma once

#include <algorithm>

#include "cuda/gradient/host/config.h"
#include "cuda/host/scores.hpp"

namespace tessera::cuda::gradient {

/// The place in a list of compiled shapes of the first one that is as wide as a Problem.
template <class Shapes>
std::size_t place_by_dim(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const auto& c) { return dim <= c.head_dim; });
}

/// The same in a list that has a plain shape and a general one of each.
template <class Shapes>
std::size_t place_in(const Problem& p, bool general) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *Shapes::first([&](const auto& c) { return c.general == general && dim <= c.head_dim; });
}
template <class Shapes>
std::size_t place_in(const Problem& p) {
    return place_in<Shapes>(p, changes_scores(p) || !scale_can_wait(p));
}

}  // namespace tessera::cuda::gradient
