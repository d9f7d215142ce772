// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera {

/// fa2 forward on the CPU sums the keys of a row in chunks of this many, each with its own (m, l, O), and merges them
/// in ascending order (docs/decisions/fixed-split.md). Tiles of keys begin anew with each chunk; a merge costs under
/// 1 % of a chunk's GEMMs.
inline constexpr std::int64_t kSplitKeys = 512;

}  // namespace tessera
