// SPDX-License-Identifier: Apache-2.0
//
// Counts the arithmetic of a Problem. Only pairs that the mask makes visible count, so that skipped tiles shorten the
// time and never raise the count.
#pragma once

#include <cstdint>

#include "tessera/attention.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"
#include "tessera/tensor.hpp"

namespace tessera::measure {

/// Returns the visible (query, key) pairs over all sequences and query heads. `cu_seqlens_*` are read for ragged
/// Problems only.
std::int64_t visible_pairs(const Problem& problem, const TensorView& cu_seqlens_q = {},
                           const TensorView& cu_seqlens_kv = {});

/// visible_pairs() of a forward call, whose K and V may be a cache.
std::int64_t visible_pairs(const Problem& problem, const ForwardArgs& args);

/// Returns the floating point operations of the GEMMs: forward 2 (d + dv) per pair (S = QK^T, O = PV); backward 2 (3 d
/// + 2 dv) (S again, dP = dO V^T, dV, dQ, dK).
double flop(const Problem& problem, Pass pass, std::int64_t pairs);

/// Returns 10^9 operations per second; 0 if no time passed.
inline double gflops(double operations, double milliseconds) {
    return milliseconds > 0 ? operations / (milliseconds * 1e6) : 0;
}

}  // namespace tessera::measure
