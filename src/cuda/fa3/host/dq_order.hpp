// SPDX-License-Identifier: Apache-2.0
//
// The fixed order in which key blocks add to dQ in fa3's backward (backward/host/dq_order.hpp has what it shares with
// gradient). CTAs draw their number from a counter (KeyBlockNumbering), and no CTA waits for long.
//
//     for the key blocks n of a head, in launch order:                 each by a CTA
//         for the query blocks m that see n, from first_query_block(n) on and then from the first one (StepIterator):
//             wait until semaphore[accumulator][m] == position(accumulator, m, n)
//             dQ[accumulator][m] += dS K of (m, n)                     a store where the position is 0
//             semaphore[accumulator][m] += 1
//
// There are three launch orders. The sequence's own lengths and the size of a group decide between them, so a head has
// the same bits in any batch and among any number of heads.
//
//   descending  Block n starts at the query block that lies as far along as n does. It goes on to its last query block
//               with accumulator 0, then from its first one with accumulator 1. Block n + 1 was launched earlier and is
//               start_stride query blocks ahead, so n seldom waits.
//   ascending   Causal GQA, as many queries as keys: the longest blocks are launched first. All go from the last query
//               block back to the diagonal, with all query heads of the CTA at each; one accumulator. Each block is a
//               step behind the one before it, and shorter.
//   segmented   Causal, as many queries as keys, one query head a group, many blocks: a head's blocks form kSegments
//               segments, descending in each. The segments with the longest blocks of all heads are launched first; one
//               accumulator.
//
// A long sequence is cut into parts of queries (cuda/host/query_parts.hpp). Each part has a launch and the order of the
// sequence, among its own query blocks.
#pragma once

#include <algorithm>

#include "cuda/backward/host/dq_order.hpp"
#include "cuda/backward/host/head_split.hpp"
#include "cuda/fa3/host/backward_config.h"
#include "cuda/host/band32.hpp"
#include "cuda/host/query_parts.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa3::backward {

/// The order of key blocks in one accumulator of dQ. It is a template argument, since work of a thread between two
/// additions delays the next CTA.
enum class DqOrder { descending, ascending, segmented };

/// The fewest key blocks of one head that are cut into segments.
inline constexpr int kMinBlocksToSegment = kMinBlocksOfAllHeads / assumed_kv_heads(1);

/// Without a mask and with one query head a group, up to this many key blocks start at query block 0 and need one
/// accumulator. Each runs a step behind the one that adds before it, a short wait while there are few.
inline constexpr int kMaxAlignedBlocks = 4;

/// May sequences of a call be segmented? `max_blocks`: key blocks of one head, at most.
TESSERA_HOST_DEVICE constexpr bool may_use_segments(const Mask& mask, int group, int max_blocks) {
    return group == 1 && !mask.trivial() && max_blocks >= kMinBlocksToSegment;
}

/// The numbers that decide the order of one sequence, computed once.
struct SequenceSchedule : Band32 {
    int len_q;
    int count_q, count_kv;  ///< query blocks, key blocks
    int start_stride;       ///< query blocks between the starts of consecutive key blocks
    int blocks_per_start;   ///< over 1 where there are more key blocks: so many start together
    bool ascending;
    bool segmented;
    int head_splits;             ///< CTAs that share the group's query heads of one key block
    int heads_per_split;         ///< query heads of each
    int first_query, end_query;  ///< the part of the queries that the launch has; 0 and len_q: all

    TESSERA_HOST_DEVICE int len_kv() const { return last_key + 1; }
    TESSERA_HOST_DEVICE bool has_parts() const { return end_query - first_query < len_q; }
    /// Are dK and dV sums in the workspace first, over head splits or parts?
    TESSERA_HOST_DEVICE bool sums_in_workspace() const { return head_splits > 1 || has_parts(); }
    /// Has the sequence no queries in this launch's part? A sequence of one part has all of them in part 0.
    TESSERA_HOST_DEVICE bool is_past_last_part() const { return first_query > 0 && first_query >= len_q; }
    /// Are all pairs of these queries and keys in the sequence and visible? (Band32::full() takes a minimum instead of
    /// two comparisons. With it, ptxas spills 84 bytes in delta_kernel of general shapes.)
    TESSERA_HOST_DEVICE bool unmasked(int query, int queries, int key, int keys) const {
        return query + queries <= len_q && key + keys - 1 <= last_key && key >= query + queries - 1 + low &&
               key + keys - 1 <= query + high;
    }
};

/// The order of one head of one sequence.
template <int kBlockQ, int kBlockKv>
struct BlockSchedule : SequenceSchedule {
    /// `group`: query heads of a kv head. All queries are one part (set_part).
    TESSERA_HOST_DEVICE void set(const Mask& mask, int own_len_q, int own_len_kv, int group) {
        static_cast<Band32&>(*this) = Band32(mask.bind(own_len_q, own_len_kv));
        len_q = own_len_q;
        count_q = (len_q + kBlockQ - 1) / kBlockQ;
        count_kv = (own_len_kv + kBlockKv - 1) / kBlockKv;
        start_stride = std::max((count_q + 1) / std::max(count_kv, 1), 1);
        blocks_per_start = std::max((count_kv + count_q - 1) / std::max(count_q, 1), 1);
        if (count_q >= count_kv) blocks_per_start = 1;
        else start_stride = 1;
        const bool all_seen = low <= 1 - len_q && high >= own_len_kv - 1;
        if (group == 1 && all_seen && count_kv <= kMaxAlignedBlocks) {
            blocks_per_start = std::max(count_kv, 1), start_stride = 1;
        }
        // The conditional operator keeps a branch here. Without it, ptxas assigns registers differently.
        const bool square = is_causal_square(*this, len_q, own_len_kv) ? true : false;
        ascending = group > 1 && square;
        segmented = square && may_use_segments(mask, group, count_kv);
        head_splits = ascending ? EvenHeadSplit::num_splits(group, count_kv, own_len_kv) : 1;
        heads_per_split = group / head_splits;
        first_query = 0;
        end_query = len_q;
    }
    /// Copies `known`, the schedule that the host computed; for a ragged sequence computes it.
    TESSERA_HOST_DEVICE void set_of(const SequenceSchedule& known, bool ragged, const Mask& mask, int own_len_q,
                                    int own_len_kv, int group) {
        if (ragged) set(mask, own_len_q, own_len_kv, group);
        else static_cast<SequenceSchedule&>(*this) = known;
    }
    /// Leaves only a part of the queries, after set(). `part_queries`: of a part in which a CTA has all heads of a
    /// group (QueryParts::fitting).
    TESSERA_HOST_DEVICE void set_part(int part, int part_queries) {
        const QueryParts parts(len_q, part_queries * head_splits);
        first_query = parts.begin(part);
        end_query = parts.begin(part + 1);
    }
    /// Key blocks of a segment, if there are `segments` of them.
    TESSERA_HOST_DEVICE int segment_size(int segments) const { return cuda::segment_size(count_kv, segments); }
    /// The key block that is launched as number `index` of a segment of up to `max_size` blocks. Returns count_kv, a
    /// block that does not exist, where this sequence's segments are shorter.
    TESSERA_HOST_DEVICE int key_block(int segment, int index, int segments, int max_size) const {
        const int size = segment_size(segments);
        const int offset = ascending ? index : max_size - 1 - index;
        if (offset >= size) return count_kv;
        return (ascending || segmented ? segment : segments - 1 - segment) * size + offset;
    }
    /// First key block of the segment of block n. All blocks below this one add earlier.
    TESSERA_HOST_DEVICE int segment_begin(int n) const {
        return segmented ? n / segment_size(kSegments) * segment_size(kSegments) : 0;
    }
    /// Last key block of the segment of block n.
    TESSERA_HOST_DEVICE int segment_last(int n) const {
        return segmented ? segment_begin(n) + segment_size(kSegments) - 1 : count_kv;
    }

    /// Query blocks of this part that see some key of block n.
    TESSERA_HOST_DEVICE Span query_blocks_of(int n) const {
        const int key = n * kBlockKv;
        const int begin = std::max(key - high, first_query);
        const int end = std::min(std::min(key + kBlockKv, len_kv()) - low, end_query);
        if (begin >= end || low > high) return Span{0, 0};
        return Span{begin / kBlockQ, (end + kBlockQ - 1) / kBlockQ};
    }
    /// The query blocks that block n visits, and the one that it starts at unless ascending.
    TESSERA_HOST_DEVICE QueryVisits visits_of(int n) const { return {query_blocks_of(n), first_query_block(n)}; }
    /// Query blocks that exist in full and see all of these keys.
    TESSERA_HOST_DEVICE Span unmasked_query_blocks(int key, int keys) const {
        if (key + keys > len_kv()) return Span{0, 0};
        const int first = std::max(key + keys - 1 - high, 0);
        const int end = std::max(key + 1 - low, 0);
        return Span{(first + kBlockQ - 1) / kBlockQ, (end < len_q ? end : len_q) / kBlockQ};
    }
    /// Key blocks that some query of block m sees.
    TESSERA_HOST_DEVICE Span key_blocks_of(int m) const {
        const int query = m * kBlockQ;
        const int begin = std::max(query + low, 0);
        const int end = std::min(std::min(query + kBlockQ, len_q) + high, len_kv());
        if (begin >= end || low > high) return Span{0, 0};
        return Span{begin / kBlockKv, (end + kBlockKv - 1) / kBlockKv};
    }
    /// Query block that key block n starts at, unless ascending: later key blocks start there or further on.
    TESSERA_HOST_DEVICE int first_query_block(int n) const { return n / blocks_per_start * start_stride; }
    /// The last key block that starts at query block m or before.
    TESSERA_HOST_DEVICE int last_started_by(int m) const { return (m / start_stride + 1) * blocks_per_start - 1; }
    /// Key blocks that add to this accumulator of query block m before n does: the value of the semaphore that n waits
    /// for.
    TESSERA_HOST_DEVICE int position(int accumulator, int m, int n) const {
        if (ascending) return n;
        return segmented ? position_in_segment(m, n, segment_begin(n), segment_last(n))
                         : position_descending(accumulator, m, n);
    }
    TESSERA_HOST_DEVICE int position_descending(int accumulator, int m, int n) const {
        const int last = key_blocks_of(m).end - 1;
        return (accumulator == 0 ? std::min(last, last_started_by(m)) : last) - n;
    }
    /// position() with one accumulator. `begin`, `last`: segment_begin(n) and segment_last(n), which a CTA keeps.
    TESSERA_HOST_DEVICE int position_in_segment(int m, int n, int begin, int last) const {
        return std::min(key_blocks_of(m).end - 1, last) - n + begin;
    }
    /// Is the first key block, of the head or of a segment, the last one to add to every query block, with one
    /// accumulator?
    TESSERA_HOST_DEVICE bool first_block_adds_last() const {
        const bool all_see_first = low <= 1 - len_q && high >= 0 && count_kv > 0;
        const bool one_accumulator = blocks_per_start >= count_kv || (high == 0 && len_q == len_kv());
        return all_see_first && one_accumulator && !ascending;
    }
    /// Does any key block add to this accumulator of query block m?
    TESSERA_HOST_DEVICE bool has_contributions(int accumulator, int m) const {
        const Span keys = key_blocks_of(m);
        if (keys.begin >= keys.end) return false;
        if (ascending) return accumulator == 0;
        return accumulator == 0 ? last_started_by(m) >= keys.begin : keys.end - 1 > last_started_by(m);
    }
};

template <Config kConfig>
using ScheduleOf = BlockSchedule<kConfig.block_q, kConfig.block_kv>;

/// The steps of one key block: its query blocks, for each query head of the CTA. kAscending: the order of the sequence.
template <bool kAscending>
struct StepIterator : QueryVisits {
    int heads_left;      ///< query heads of all steps; ascending: of the steps at this m
    int m, accumulator;  ///< query block and dQ accumulator of this step

    template <int kBlockQ, int kBlockKv>
    TESSERA_HOST_DEVICE StepIterator(const BlockSchedule<kBlockQ, kBlockKv>& schedule, int n, int heads) {
        static_cast<Span&>(*this) = schedule.query_blocks_of(n);
        start = kAscending ? end - 1 : start_in(*this, schedule.first_query_block(n));
        heads_left = begin < end ? heads : 0;
        rewind();
    }
    TESSERA_HOST_DEVICE bool more() const { return heads_left > 0; }
    /// All steps, before the first advance().
    TESSERA_HOST_DEVICE int count() const { return heads_left * QueryVisits::count(); }
    TESSERA_HOST_DEVICE void advance(int heads) {
        if constexpr (kAscending) {
            if (--heads_left == 0 && --m >= begin) heads_left = heads;
            return;
        }
        ++m;
        if (accumulator == 0 && m == end) m = begin, accumulator = 1;
        if (accumulator == 0 || m != start) return;
        --heads_left;
        rewind();
    }

 private:
    TESSERA_HOST_DEVICE void rewind() {
        m = start == end ? begin : start;
        accumulator = start == end ? 1 : 0;
    }
};

}  // namespace tessera::cuda::fa3::backward
