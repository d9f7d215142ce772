// SPDX-License-Identifier: Apache-2.0
//
// The fixed order in which key blocks add to dQ in the backward of fa1 and fa2 (backward/host/dq_order.hpp has what it
// shares with fa3's). CTAs take key blocks from a counter, and seldom wait.
//
// Block n starts at its diagonal, so block n + 1 visits each tile before it. The semaphore of an accumulator holds the
// number of the block that has added last, plus 1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/backward/host/dq_order.hpp"
#include "cuda/backward/host/head_split.hpp"
#include "cuda/backward/host/placed_key_block.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::gradient {

/// Is a sequence under a causal mask cut into segments if a kv head has so many key blocks over all its splits? Without
/// groups, 32 heads are assumed: here segments gain more than in fa3.
TESSERA_HOST_DEVICE constexpr bool may_use_segments(int group, std::int64_t blocks) {
    constexpr int kHeadsWithoutGroups = 32;
    return (group == 1 ? kHeadsWithoutGroups : assumed_kv_heads(group)) * blocks >= kMinBlocksOfAllHeads;
}

/// Segments of a call. `blocks`: key blocks of a kv head over all its splits, at most.
constexpr int most_segments(const Mask& mask, int group, std::int64_t blocks) {
    return !mask.trivial() && may_use_segments(group, blocks) ? kSegments : 1;
}

/// The blocks in one segment of a head that has `blocks` of them; the last segment may have fewer. `segments`: 1 or
/// kSegments.
TESSERA_HOST_DEVICE constexpr int segment_size(int segments, int blocks) {
    return segments > 1 ? cuda::segment_size(blocks, kSegments) : blocks;
}

/// The first block of the segment that starts as number `segment`. The segment with the head's first blocks starts
/// first if the sequence is `segmented`; else last, so that all its blocks are in descending order.
TESSERA_HOST_DEVICE constexpr int first_block_of_segment(int segment, int segments, int size, bool segmented) {
    return (segmented ? segment : segments - 1 - segment) * size;
}

/// The query tiles that a key block visits: from the diagonal to the end, then from the beginning to the diagonal. All
/// three bounds grow with the number of the block, so the blocks that add to one accumulator of a tile are neighbours.
struct DiagonalVisits : QueryVisits {
    TESSERA_HOST_DEVICE DiagonalVisits() {
        begin = 0;
        end = 0;
        start = 0;
    }
    /// Counts tiles of 2^log2_block_q queries: a division would take thousands of clocks of the CTA's first thread.
    TESSERA_HOST_DEVICE DiagonalVisits(const Band& band, int block, int block_kv, int log2_block_q) : DiagonalVisits() {
        const std::int64_t first_key = std::int64_t{block} * block_kv;
        if (first_key >= band.len_kv) return;
        const Range queries = band.q_range(first_key, std::min(first_key + block_kv, band.len_kv));
        if (queries.empty()) return;
        begin = static_cast<int>(queries.begin >> log2_block_q);
        end = static_cast<int>((queries.end + (1 << log2_block_q) - 1) >> log2_block_q);
        start = start_in(*this, static_cast<int>(first_key >> log2_block_q));
    }
};

/// A key block: the tiles that it visits, and the block that adds to each of them before it.
struct KeyBlockOrder {
    int block = 0;
    DiagonalVisits own;
    DiagonalVisits next;  // the tiles of block + 1; empty if that block is in another segment
    int earlier = -1;     // the key block that adds just before this one to tiles that `next` does not visit; -1: none
    TESSERA_HOST_DEVICE void set(const Band& band, int number, int block_kv, int log2_block_q) {
        block = number;
        own = DiagonalVisits(band, number, block_kv, log2_block_q);
        next = DiagonalVisits(band, number + 1, block_kv, log2_block_q);
    }
    /// Sets a block of a sequence that has `blocks` of them; number `blocks` is none. `segmented`: the sequence is cut
    /// into segments.
    TESSERA_HOST_DEVICE void set_in_sequence(const Band& band, int number, int blocks, bool segmented, int block_kv,
                                             int log2_block_q) {
        set(band, number, block_kv, log2_block_q);
        if (!segmented) return;
        const int size = segment_size(kSegments, blocks);
        const int segment = number / size;
        if (number - segment * size == size - 1) next = DiagonalVisits();
        if (segment > 0) earlier = (segment - 1) * size;
    }
    /// Sets the block that starts as number `started` of `segment`. `blocks`: of this head; `most_blocks`: of any head
    /// of the call. Every head has CTAs for `most_blocks`, and those without a block get number `blocks`. `segmented`:
    /// the sequence is cut into segments; the blocks of others are numbered through, from the last segment to the
    /// first.
    TESSERA_HOST_DEVICE void set_started(const Band& band, int segment, int started, int segments, int blocks,
                                         int most_blocks, bool segmented, int block_kv, int log2_block_q) {
        const int size = segment_size(segments, blocks);
        const int first = first_block_of_segment(segment, segments, size, segmented);
        const int index = segment_size(segments, most_blocks) - 1 - started;
        set_in_sequence(band, index < size ? first + index : blocks, blocks, segmented, block_kv, log2_block_q);
    }
    /// Leaves only the query tiles of [first, last): those of a part of the queries (cuda/host/query_parts.hpp). The
    /// order in a tile stays what it is.
    TESSERA_HOST_DEVICE void clamp(int first, int last) {
        own.clamp(first, last);
        next.clamp(first, last);
    }
    /// The block that adds to the accumulator before this one; -1: none, so this one stores.
    TESSERA_HOST_DEVICE int predecessor(int accumulator, int tile) const {
        return next.adds_to(accumulator, tile) ? block + 1 : earlier;
    }
};

/// The key blocks of a sequence of a ragged call, and the order in which they start (cuda/host/work_list.hpp).
struct SequenceBlocks {
    int count;       ///< key blocks
    int splits;      ///< head splits of a group
    bool segmented;  ///< the key blocks are cut into segments

    /// `heads`: query heads of a split.
    TESSERA_HOST_DEVICE SequenceBlocks(const Mask& mask, const Band& band, int group, int heads, int block_kv)
        : count(static_cast<int>((band.len_kv + block_kv - 1) / block_kv)),
          splits(HeadSplit::num_splits(heads, group)),
          segmented(!mask.trivial() && is_causal_square(band) &&
                    may_use_segments(group, std::int64_t{splits} * count)) {}
    TESSERA_HOST_DEVICE int items() const { return count * splits; }
    TESSERA_HOST_DEVICE PlacedKeyBlock place(int index, int heads_kv) const {
        const int heads = heads_kv * splits;
        return segmented ? place_in_segments(index, heads, count, segment_size(kSegments, count))
                         : place_in_rounds(index, heads, count, 1, false);
    }
};

}  // namespace tessera::cuda::gradient
