// SPDX-License-Identifier: Apache-2.0
//
// The keys of a sequence by which a launch is chosen where no bit depends on the choice. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/problem.hpp"

namespace tessera::cuda {

/// A varlen call goes by the mean of its sequences: a bound on their lengths may be missing or far too large, and the
/// host does not read cu_seqlens.
inline std::int64_t typical_keys(const Problem& p) {
    return p.ragged ? (p.total_kv + p.batch - 1) / std::max<std::int64_t>(p.batch, 1) : p.len_kv;
}

}  // namespace tessera::cuda
