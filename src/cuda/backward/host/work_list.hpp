// SPDX-License-Identifier: Apache-2.0
//
// The work of a ragged call's main kernel: a list that a kernel makes on the device from cu_seqlens
// (cuda/backward/work_list.cuh). So the host reads no lengths. CTAs past the end of the list, if any, exit at once.
// Plain C++.
//
//     item     a key block of a head split, of all kv heads: each of these has a number in it
//     list     the items of all sequences, the longest sequence first. It ends where its memory ends, so the host knows
//              the end of the numbers, and the counter of the call begins at the first item's number.
//     number   item = number / heads_kv names a sequence. Its numbers count from its first item on, in the order in
//              which its key blocks start.
#pragma once

#include <algorithm>

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// An item: its sequence. A CTA reads it with two loads.
struct alignas(16) ListedSequence {
    int batch;
    int first_item;         ///< the sequence's first item
    int first_q, first_kv;  ///< rows where the sequence begins
    int len_q, len_kv;
    int unused[2];
};

/// Sequences are listed by classes of length, so that short key blocks fill up the end: eight for each power of two.
inline constexpr int kLengthClasses = 232;
TESSERA_HOST_DEVICE constexpr int length_class(int len) {
    int shift = 0;
    while (len >> shift >= 16) ++shift;
    return 8 * shift + (len >> shift);
}
/// The length that counts: a sequence of few queries and many keys has many key blocks that wait for each other.
TESSERA_HOST_DEVICE constexpr int length_class(int len_q, int len_kv) { return length_class(std::max(len_q, len_kv)); }

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
