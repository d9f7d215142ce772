// SPDX-License-Identifier: Apache-2.0
//
// The work of a ragged call: a list that a kernel makes on the device from cu_seqlens (cuda/tile/work_list.cuh). So the
// host reads no lengths, and no CTA looks for work that does not exist. Plain C++.
//
//     item     forward: a tile of queries, of all heads; backward: a key block of a head split, of all kv heads
//     list     the items of all sequences, the longest sequence first. It ends where its memory ends.
//
// In a backward every kv head of an item has a number: item = number / heads_kv names a sequence, whose numbers count
// from its first item on, in the order in which its key blocks start. The host knows the end of the numbers, and the
// counter of the call begins at the first item's number; CTAs past the end, if any, exit at once.
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

/// Sequences are listed by classes of length, so that short items fill up the end: eight for each power of two.
inline constexpr int kLengthClasses = 232;
TESSERA_HOST_DEVICE constexpr int length_class(int len) {
    int shift = 0;
    while (len >> shift >= 16) ++shift;
    return 8 * shift + (len >> shift);
}
/// The length that counts: a sequence of few queries and many keys has many key blocks that wait for each other.
TESSERA_HOST_DEVICE constexpr int length_class(int len_q, int len_kv) { return length_class(std::max(len_q, len_kv)); }

}  // namespace tessera::cuda
