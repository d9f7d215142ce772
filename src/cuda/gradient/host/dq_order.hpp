// SPDX-License-Identifier: Apache-2.0
//
// The order in which key blocks add to dQ. It is fixed, so that dQ has the same bits in every run, and it is laid out
// so that CTAs seldom wait.
//
// Invariant: a CTA waits only for CTAs that have started before it. CTAs take key blocks from a counter, in the order
// in which the blocks of a head add to dQ: descending.
//
//     for segment in 0 .. segments - 1:          1 segment, or 4 under a causal mask with many blocks
//         for head in all heads:
//             for n in the segment's blocks, descending:    one CTA
//                 for m in [diagonal(n), end(n)):      dQ accumulator 0 of query tile m += dS K
//                 for m in [begin(n), diagonal(n)):    dQ accumulator 1 of query tile m += dS K
//
// Block n starts at its diagonal, so block n + 1 visits each tile before it. Both accumulators of a tile receive their
// blocks in descending order inside a segment, segment 0 (the first blocks of the head) first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/mask.hpp"

namespace tessera::cuda::gradient {

/// Under a causal mask the blocks of low numbers see the most queries. A head with many blocks is cut into segments, so
/// that its longest blocks do not start last.
inline constexpr int kSegments = 4;
/// The fewest key blocks, over all heads of a sequence, that are cut into segments.
inline constexpr int kSegmentedBlocks = 256;

/// Segments of a call whose sequences have at most `blocks` key blocks over all heads and splits.
constexpr int most_segments(const Mask& mask, std::int64_t blocks) {
    return !mask.trivial() && blocks >= kSegmentedBlocks ? kSegments : 1;
}

/// The blocks in one segment of a head that has `blocks` of them; the last segment may have fewer.
TESSERA_HOST_DEVICE constexpr int segment_size(int segments, int blocks) {
    return segments > 1 ? (blocks + kSegments - 1) / kSegments : blocks;
}

/// True for a mask that is causal and nothing else, over as many queries as keys.
TESSERA_HOST_DEVICE constexpr bool is_triangle(const Band& band) {
    return band.len_q == band.len_kv && band.high == 0 && band.low <= 1 - band.len_q;
}

/// The query tiles that a key block visits, in order: from the diagonal to the end, then from the beginning to the
/// diagonal. All three bounds grow with the number of the block, so the blocks that add to one accumulator of a tile
/// are neighbours.
struct QueryRange {
    int begin = 0;
    int end = 0;
    int diagonal = 0;  // in [begin, end]

    QueryRange() = default;
    /// Counts tiles of 2^log2_block_q queries: a division would take thousands of clocks of the CTA's first thread.
    TESSERA_HOST_DEVICE QueryRange(const Band& band, int block, int block_kv, int log2_block_q) {
        const std::int64_t first_key = std::int64_t{block} * block_kv;
        if (first_key >= band.len_kv) return;
        const Range queries = band.q_range(first_key, std::min(first_key + block_kv, band.len_kv));
        if (queries.empty()) return;
        begin = static_cast<int>(queries.begin >> log2_block_q);
        end = static_cast<int>((queries.end + (1 << log2_block_q) - 1) >> log2_block_q);
        diagonal = std::min(std::max(static_cast<int>(first_key >> log2_block_q), begin), end);
    }

    /// Leaves only the tiles of [first, last).
    TESSERA_HOST_DEVICE void clamp(int first, int last) {
        const auto clamped = [&](int tile) { return std::min(std::max(tile, first), last); };
        begin = clamped(begin);
        end = clamped(end);
        diagonal = clamped(diagonal);
    }
    TESSERA_HOST_DEVICE int count() const { return end - begin; }
    /// The dQ accumulator, 0 or 1, of the tile that is visited as number `index`.
    TESSERA_HOST_DEVICE int accumulator(int index) const { return index < end - diagonal ? 0 : 1; }
    TESSERA_HOST_DEVICE int tile(int index) const {
        return accumulator(index) == 0 ? diagonal + index : begin + index - (end - diagonal);
    }
    /// True if the block adds to this accumulator of the tile.
    TESSERA_HOST_DEVICE bool adds_to(int accumulator, int tile) const {
        return accumulator == 0 ? tile >= diagonal && tile < end : tile >= begin && tile < diagonal;
    }
};

/// A key block: the tiles that it visits, and the block that adds to each of them before it.
struct KeyBlockOrder {
    int block = 0;
    QueryRange own;
    QueryRange next;   // the tiles of block + 1; empty if that block is in another segment
    int earlier = -1;  // the block that adds first where `next` does not; -1: none
    TESSERA_HOST_DEVICE void set(const Band& band, int number, int block_kv, int log2_block_q) {
        block = number;
        own = QueryRange(band, number, block_kv, log2_block_q);
        next = QueryRange(band, number + 1, block_kv, log2_block_q);
    }
    /// Sets the block that starts as number `started` of `segment`. `blocks`: of this head; `most_blocks`: of any head
    /// of the call. Every head has CTAs for `most_blocks`, and those without a block get number `blocks`. `segmented`:
    /// the sequence is cut into segments; the blocks of others are numbered through, from the last segment to the
    /// first.
    TESSERA_HOST_DEVICE void set_started(const Band& band, int segment, int started, int segments, int blocks,
                                         int most_blocks, bool segmented, int block_kv, int log2_block_q) {
        const int size = segment_size(segments, blocks);
        const int first = (segmented ? segment : segments - 1 - segment) * size;
        const int index = segment_size(segments, most_blocks) - 1 - started;
        set(band, index < size ? first + index : blocks, block_kv, log2_block_q);
        if (!segmented) return;
        if (index == size - 1) next = QueryRange();
        if (segment > 0) earlier = first - size;
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

}  // namespace tessera::cuda::gradient
