// SPDX-License-Identifier: Apache-2.0
//
// The list of a ragged call (cuda/host/work_list.hpp) in fa3's backward: the items of a sequence, and the
// order in which they start. Plain C++.
#pragma once

#include <algorithm>

#include "cuda/backward/host/placed_key_block.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/numbering.hpp"

namespace tessera::cuda::fa3::backward {

/// A query block of a ragged call: block m of a sequence, which may be past the sequence's end.
struct SequenceBlock {
    int batch, m;
};

/// Items of a sequence.
TESSERA_HOST_DEVICE constexpr int items_of(const SequenceSchedule& schedule) {
    return schedule.count_kv * schedule.head_splits;
}

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
        return place_in_segments(index, heads, count, segment_size(count, kSegments));
    }
    const bool longest_first = splits_dv_dk ? masked : schedule.ascending;
    int per_round = 1;
    if (longest_first) per_round = std::min(heads_longest_first(count, heads, splits_dv_dk), heads);
    else if (schedule.blocks_per_start >= count) per_round = heads;
    return place_in_rounds(index, heads, count, per_round, longest_first);
}

}  // namespace tessera::cuda::fa3::backward
