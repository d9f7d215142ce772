// SPDX-License-Identifier: Apache-2.0
//
// The order in which the key blocks of a sequence start: from a number to a key block. Plain C++.
#pragma once

#include <algorithm>

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// A key block of a sequence.
struct PlacedKeyBlock {
    int head;  ///< among the head splits of all kv heads: kv head * head splits + split
    int n;
};

/// The key block of number `index` of a sequence whose heads form segments of `size` key blocks of `count`: segment by
/// segment, of all heads, descending in each.
TESSERA_HOST_DEVICE constexpr PlacedKeyBlock place_in_segments(int index, int heads, int count, int size) {
    const int segment = index / (heads * size);  // all but the last one are full
    const int of_segment = index - segment * heads * size;
    const int own_size = std::min(size, count - segment * size);
    const int head = of_segment / own_size;
    return {head, segment * size + own_size - 1 - (of_segment - head * own_size)};
}

/// Likewise for rounds of `per_round` heads, which take turns.
TESSERA_HOST_DEVICE constexpr PlacedKeyBlock place_in_rounds(int index, int heads, int count, int per_round,
                                                             bool ascending) {
    const int round = index / (per_round * count);
    const int of_round = index - round * per_round * count;
    const int own_heads = std::min(per_round, heads - round * per_round);
    const int row = of_round / own_heads;
    return {round * per_round + of_round - row * own_heads, ascending ? row : count - 1 - row};
}

}  // namespace tessera::cuda
