// SPDX-License-Identifier: Apache-2.0
//
// The work of the CTA with a given number: the launch order of key blocks, or of query tiles in kernels whose outer
// loop is over queries. Plain C++: the kernels decode with it, and the cost model goes through the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/backward/host/head_split.hpp"
#include "cuda/host/divider.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa3::backward {

/// A Divider by 1 at least, for counts that may be 0.
inline Divider divider_by(std::int64_t count) { return Divider(static_cast<int>(std::max<std::int64_t>(count, 1))); }

/// Heads of a round in which the longest key blocks come first. With few heads, more of the CTAs that run share the
/// rows of Q and dO in the L2 cache; with many, the longest blocks are balanced better. If the heads have few blocks,
/// all heads are one round.
template <class Int>
TESSERA_HOST_DEVICE constexpr Int heads_longest_first(Int blocks, Int heads, bool splits_dv_dk) {
    if (!splits_dv_dk && heads * blocks <= EvenHeadSplit::kMinBlocks) return heads;
    const Int own = std::max<Int>(blocks, 1);
    const Int few = splits_dv_dk ? 4 : std::min<Int>(std::max<Int>(1024 / own, 4), 8);
    return std::max<Int>(few, 128 / own);
}

/// The rounds in which the key blocks of all heads are launched. A head here is a head split of a kv head of a
/// sequence.
struct KeyBlockRounds {
    int segments = 1;      ///< segments of a head
    int segment_size = 0;  ///< key blocks of a segment
    int heads = 1;         ///< heads of a round
};

/// The work of one number.
struct KeyBlockNumber {
    int batch, kv_head, split;
    int segment, index;  ///< segment of the head, and index of the key block in its segment, in launch order
};

/// The numbers 0 ... count - 1 of the key blocks of a call:
///
///     for the rounds of heads_per_round heads:
///         for segment in 0 .. segments - 1:
///             for head in the round:
///                 for index in 0 .. segment_size - 1:     one number
///
/// Every head has segments * segment_size numbers, some of which may be without a key block (BlockSchedule::key_block).
/// A ragged call has the numbers of its list instead (key_block_list.hpp).
struct KeyBlockNumbering {
    int heads = 0;  ///< sequences * kv heads * splits
    int heads_per_round = 1;
    int segments = 1;
    int segment_size = 0;
    int splits = 1;      ///< head splits of a group, the most that a sequence has
    unsigned count = 0;  ///< numbers of the call
    Divider by_round;    ///< divides by the numbers of a round
    Divider by_segment_size;
    Divider by_segment;             ///< divides by the numbers that one segment of all heads of a round has
    Divider by_last_round_segment;  ///< likewise in the last round, which may have fewer heads
    Divider by_sequence;            ///< divides by the heads of a sequence
    Divider by_splits;
    Divider by_listed_heads;  ///< ragged: divides by the kv heads, which are the numbers of an item of the list

    KeyBlockNumbering() = default;
    KeyBlockNumbering(std::int64_t batch, std::int64_t heads_kv, int head_splits, const KeyBlockRounds& rounds)
        : heads(static_cast<int>(batch * heads_kv) * head_splits),
          heads_per_round(rounds.heads),
          segments(rounds.segments),
          segment_size(rounds.segment_size),
          splits(head_splits),
          count(static_cast<unsigned>(heads) * static_cast<unsigned>(rounds.segments * rounds.segment_size)),
          by_round(divider_by(rounds.heads * std::int64_t{rounds.segments} * rounds.segment_size)),
          by_segment_size(divider_by(rounds.segment_size)),
          by_segment(divider_by(rounds.heads * std::int64_t{rounds.segment_size})),
          by_last_round_segment(divider_by(heads % std::max(rounds.heads, 1) * std::int64_t{rounds.segment_size})),
          by_sequence(divider_by(heads_kv * head_splits)),
          by_splits(divider_by(head_splits)) {}
    /// The numbers of a ragged call, whose list has a capacity of `items` (key_block_list.hpp).
    static KeyBlockNumbering of_list(std::int64_t items, std::int64_t heads_kv, int head_splits) {
        KeyBlockNumbering numbering;
        numbering.splits = head_splits;
        numbering.count = static_cast<unsigned>(items * heads_kv);
        numbering.by_listed_heads = divider_by(heads_kv);
        return numbering;
    }

    TESSERA_HOST_DEVICE KeyBlockNumber decode(unsigned number) const {
        const int own = static_cast<int>(number);
        const int round = by_round.quotient(own);
        const int of_round = own - round * by_round.divisor();
        const int first_head = round * heads_per_round;
        const Divider& by_own_segment = heads - first_head < heads_per_round ? by_last_round_segment : by_segment;
        KeyBlockNumber key_block;
        key_block.segment = by_own_segment.quotient(of_round);
        const int of_segment = of_round - key_block.segment * by_own_segment.divisor();
        const int head_of_round = by_segment_size.quotient(of_segment);
        key_block.index = of_segment - head_of_round * segment_size;
        const int head = first_head + head_of_round;
        key_block.batch = by_sequence.quotient(head);
        const int of_sequence = head - key_block.batch * by_sequence.divisor();
        key_block.kv_head = by_splits.quotient(of_sequence);
        key_block.split = of_sequence - key_block.kv_head * splits;
        return key_block;
    }
};

/// A tile of queries of a query head of a sequence; ragged: of a query head of all sequences.
struct QueryTileNumber {
    int batch_head, tile;
};

/// The numbers of the query tiles of a call. Under a causal mask a head's last tile takes longest, so tiles go from the
/// last to the first, and heads_per_round heads take turns. In a ragged call a head has the tiles of all sequences
/// (ragged_tile).
struct QueryTileNumbering {
    int tiles = 0;                ///< query tiles of a head
    int heads = 0;                ///< sequences * query heads; ragged: query heads
    Divider by_heads;             ///< divides by the heads of a round
    Divider by_last_round_heads;  ///< divides by the heads of the last round, which may be fewer
    Divider by_round;             ///< divides by the tiles of a round

    QueryTileNumbering() = default;
    QueryTileNumbering(std::int64_t all_heads, std::int64_t tiles_of_head, std::int64_t heads_per_round)
        : tiles(static_cast<int>(tiles_of_head)),
          heads(static_cast<int>(all_heads)),
          by_heads(divider_by(heads_per_round)),
          by_last_round_heads(divider_by(all_heads % std::max<std::int64_t>(heads_per_round, 1))),
          by_round(divider_by(heads_per_round * tiles_of_head)) {}

    TESSERA_HOST_DEVICE QueryTileNumber decode(int number) const {
        const int round = by_round.quotient(number);
        const int of_round = number - round * by_round.divisor();
        const int first_head = round * by_heads.divisor();
        const Divider& by_own_heads = heads - first_head < by_heads.divisor() ? by_last_round_heads : by_heads;
        const int row = by_own_heads.quotient(of_round);
        return {first_head + of_round - row * by_own_heads.divisor(), tiles - 1 - row};
    }
};

}  // namespace tessera::cuda::fa3::backward
