// SPDX-License-Identifier: Apache-2.0
//
// The part that fa3/backward and gradient share of the fixed order in which key blocks add to dQ.
//
// dQ is a sum over keys, and each key block has a CTA of its own. The order of the additions is fixed, so that dQ has
// the same bits in every run.
//
// Invariant: a CTA waits only for CTAs that have started before it. CTAs draw numbers from a counter when they start,
// and the key blocks of a head are numbered in the order in which they add.
//
//     for segment in 0 .. segments - 1:                  1 segment, or kSegments under a causal mask with many blocks
//         for head in all heads:
//             for n in the segment's blocks, descending:          one CTA
//                 for m in [start(n), end(n)):               dQ accumulator 0 of query block m += dS K
//                 for m in [begin(n), start(n)):             dQ accumulator 1 of query block m += dS K
//
// Block n + 1 is launched before block n and starts at a later query block, so n seldom waits. Both accumulators of a
// query block receive their key blocks in descending order inside a segment.
//
// Four things differ in fa3/host/dq_order.hpp and gradient/host/dq_order.hpp:
//   - start(n). gradient starts at the block's diagonal, fa3 as far along the queries as n lies along the keys. The
//     start decides the order of a sum, hence bits of dQ.
//   - When a sequence is cut into segments: may_use_segments(). fa3 never does it under GQA.
//   - The value of a semaphore. fa3 counts the additions to a query block: BlockSchedule::position() is a closed form.
//     gradient stores the number of the block that has added last, and a block knows only the one before it.
//   - fa3 has a third order for causal GQA, ascending, in which a CTA goes through its query heads at each query block.
//     The CTAs of gradient go head by head.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host/block_range.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda {

/// Segments of a head's key blocks. Under a causal mask the first blocks see the most queries; in segments, the longest
/// blocks of a head do not start last.
inline constexpr int kSegments = 4;
/// The fewest key blocks, over assumed_kv_heads() heads, that are cut into segments. Fewer blocks all run at once, and
/// segments would only wait for each other.
inline constexpr int kMinBlocksOfAllHeads = 256;

/// Key/value heads that a call is taken to have where the order of a sum is chosen. The heads of the call itself must
/// not choose it, or a head alone would have other bits than among many. `group`: query heads of a kv head.
TESSERA_HOST_DEVICE constexpr int assumed_kv_heads(int group) {
    constexpr int kQueryHeads = 64, kMost = 8;
    return std::min(std::max(kQueryHeads / group, 1), kMost);
}

/// Is the mask causal and nothing else, over as many queries as keys?
TESSERA_HOST_DEVICE constexpr bool is_causal_square(const Band& band) {
    return band.len_q == band.len_kv && band.high == 0 && band.low <= 1 - band.len_q;
}
TESSERA_HOST_DEVICE constexpr bool is_causal_square(const Band32& band, int len_q, int len_kv) {
    return len_q == len_kv && band.high == 0 && band.low <= 1 - len_q;
}

/// Key blocks of a segment if a head's `blocks` form `segments` of them; the last segments may have fewer.
template <class Int>
TESSERA_HOST_DEVICE constexpr Int segment_size(Int blocks, Int segments) {
    return (blocks + segments - 1) / segments;
}

/// The query blocks that a key block visits: start ... end - 1 with accumulator 0 of dQ, then begin ... start - 1 with
/// accumulator 1.
struct QueryVisits : Span {
    int start;  ///< in [begin, end]

    QueryVisits() = default;
    /// `seen`: the query blocks that see a key of the block; `from`: where it starts if it sees that query block.
    TESSERA_HOST_DEVICE constexpr QueryVisits(const Span& seen, int from) : Span(seen), start(start_in(seen, from)) {}
    /// The `start` of such a block.
    TESSERA_HOST_DEVICE static constexpr int start_in(const Span& seen, int from) {
        return std::min(std::max(from, seen.begin), seen.end);
    }

    /// Leaves only the query blocks of [first, last), those of a part of the queries (cuda/host/query_parts.hpp).
    TESSERA_HOST_DEVICE constexpr void clamp(int first, int last) {
        begin = std::min(std::max(begin, first), last);
        end = std::min(std::max(end, first), last);
        start = std::min(std::max(start, first), last);
    }
    /// The accumulator of visit number `index`.
    TESSERA_HOST_DEVICE constexpr int accumulator_of(int index) const { return index < end - start ? 0 : 1; }
    /// The query block of visit number `index`.
    TESSERA_HOST_DEVICE constexpr int query_block_of(int index) const {
        return accumulator_of(index) == 0 ? start + index : begin + index - (end - start);
    }
    /// Does the key block add to this accumulator of query block m?
    TESSERA_HOST_DEVICE constexpr bool adds_to(int accumulator, int m) const {
        return accumulator == 0 ? m >= start && m < end : m >= begin && m < start;
    }
};

}  // namespace tessera::cuda
