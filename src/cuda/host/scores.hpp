// SPDX-License-Identifier: Apache-2.0
//
// What the scores of a Problem go through: by this a kernel's compiled shape is chosen. Plain C++: the model asks, too.
#pragma once

#include <cmath>

#include "cuda/host/constants.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Is something added to scores, or taken out of weights?
inline bool adds_to_scores(const Problem& p) { return p.alibi || p.bias || p.dropout.probability > 0; }

/// Do scores go through anything besides scale and mask?
inline bool changes_scores(const Problem& p) { return p.softcap > 0 || adds_to_scores(p); }

/// Can the scale wait for the exponential, which then takes scale * log2(e) in one multiplication? That keeps the order
/// of scores when it is over 0, and their digits when it is normal.
inline bool scale_can_wait(const Problem& p) {
    const auto scale = static_cast<float>(p.effective_scale());
    return std::isnormal(scale) && scale > 0 && std::isfinite(scale * kLog2E);
}

}  // namespace tessera::cuda
