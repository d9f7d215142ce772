// SPDX-License-Identifier: Apache-2.0
//
// The work of a ragged call's main kernel: a list that a kernel makes on the device from cu_seqlens
// (backward/before/key_block_list.cuh), so that no host reads lengths and no CTA starts for a key block that no
// sequence has. Plain C++.
//
//     item     a key block of a head split; each kv head has a number in it
//     list     the items of all sequences, the longest sequence first. It ends where its memory ends, so the last
//     number
//              of a call is known to the host, and the counter of the call begins at the first item's number.
//     number   item = number / heads_kv names a sequence; the numbers from its first item on are its key blocks, placed
//              by place_key_block()
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/numbering.hpp"

namespace tessera::cuda::fa3::backward {

/// An item: its sequence. A CTA reads it with two loads.
struct alignas(16) ListedSequence {
    int batch;
    int first_item;         ///< the sequence's first item
    int first_q, first_kv;  ///< rows where the sequence begins
    int len_q, len_kv;
    int unused[2];
};

/// A query block of a ragged call: block m of a sequence, which may be past the sequence's end.
struct SequenceBlock {
    int batch, m;
};

/// Items of a sequence.
TESSERA_HOST_DEVICE constexpr int items_of(const SequenceSchedule& schedule) {
    return schedule.count_kv * schedule.head_splits;
}

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

/// The key block of number `index` of a sequence, in [0, items * kv heads). `heads`: head splits of all kv heads. Every
/// head has its key blocks in the order in which they add to dQ (dq_order.hpp), as KeyBlockNumbering has them in a
/// dense call:
///   ascending                       heads of a round take turns, the longest block of each first
///   segmented                       segment by segment, of all heads
///   all start at the same queries   heads take turns, so that few blocks wait for each other at their start
///   others                          head by head
/// `splits_dv_dk`: no CTA waits for another one, and the longest blocks come first if there is a mask.
TESSERA_HOST_DEVICE inline PlacedKeyBlock place_key_block(const SequenceSchedule& schedule, int heads, int index,
                                                          bool masked, bool splits_dv_dk) {
    const int count = schedule.count_kv;
    if (schedule.segmented && !splits_dv_dk) {
        const int size = segment_size(count, kSegments);
        const int segment = std::min(index / (heads * size), kSegments - 1);  // all but the last one are full
        const int of_segment = index - segment * heads * size;
        const int own_size = std::min(size, count - segment * size);
        const int head = of_segment / own_size;
        return {head, segment * size + own_size - 1 - (of_segment - head * own_size)};
    }
    const bool longest_first = splits_dv_dk ? masked : schedule.ascending;
    int per_round = 1;
    if (longest_first) per_round = std::min(heads_longest_first(count, heads, splits_dv_dk), heads);
    else if (schedule.blocks_per_start >= count) per_round = heads;
    const int round = index / (per_round * count);
    const int of_round = index - round * per_round * count;
    const int own_heads = std::min(per_round, heads - round * per_round);
    const int row = of_round / own_heads;
    return {round * per_round + of_round - row * own_heads, longest_first ? row : count - 1 - row};
}

}  // namespace tessera::cuda::fa3::backward
