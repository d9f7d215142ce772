// SPDX-License-Identifier: Apache-2.0
//
// The score modifications of a Problem, which decide a kernel's compiled shape. Plain C++, which the cost model calls
// too.
#pragma once

#include <cmath>

#include "cuda/host/constants.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Is something added to scores, or dropped from P?
inline bool adds_to_scores(const Problem& p) { return p.alibi || p.bias || p.dropout.probability > 0; }

/// Do scores go through anything besides scale and mask?
inline bool changes_scores(const Problem& p) { return p.softcap > 0 || adds_to_scores(p); }

/// Can the scale be folded into the exponential, as scale * log2(e)? It must be positive, to keep the order of scores,
/// and normal, to keep their digits.
inline bool scale_can_wait(const Problem& p) {
    const auto scale = static_cast<float>(p.effective_scale());
    return std::isnormal(scale) && scale > 0 && std::isfinite(scale * kLog2E);
}

}  // namespace tessera::cuda
