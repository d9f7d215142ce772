// SPDX-License-Identifier: Apache-2.0
//
// Chooses the compiled shape of the backward for a Problem, and how its CTAs are launched. The launch
// (backward/kernels.cc) and the cost model (src/model) call these functions. Plain C++.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/numbering.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa3::backward {

/// The largest softcap of capped shapes. It keeps every LSE within kOrdinaryLse, since there are at most 2^31 keys. (A
/// sink could make one larger.)
inline constexpr double kMaxSoftcap = 128;

/// The score modification of a Problem.
inline Scores scores_of(const Problem& p) {
    const bool drops = p.dropout.probability > 0;
    if (p.bias && !p.alibi && p.softcap <= 0 && !drops) return Scores::bias;
    if (!scale_can_wait(p) || p.bias || (p.alibi ? 1 : 0) + (p.softcap > 0 ? 1 : 0) + (drops ? 1 : 0) > 1) {
        return Scores::general;
    }
    if (p.alibi) return Scores::alibi;
    if (drops) return Scores::dropout;
    if (p.softcap <= 0) return Scores::plain;
    const bool fits_shape =
        p.softcap <= kMaxSoftcap && !p.sinks && fits(softcap_of(p.softcap, static_cast<float>(p.effective_scale())));
    return fits_shape ? Scores::capped : Scores::general;
}

/// The index in Shapes of the first one that holds a Problem; none: it is too large for them.
inline std::optional<std::size_t> shape_of(const Problem& p) {
    return Shapes::first([&](const Config& c) {
        return c.scores == scores_of(p) && p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim_v;
    });
}

/// The Config of that shape, which must exist.
inline const Config& config_of(const Problem& p) { return Shapes::kConfigs[*shape_of(p)]; }

/// The largest head_dim of shapes for such a Problem.
inline int largest_dim(const Problem& p) {
    int largest = 0;
    for (const Config& c : Shapes::kConfigs) {
        if (c.scores == scores_of(p)) largest = std::max(largest, c.head_dim);
    }
    return largest;
}

inline Tile tile_of(const Problem& p) {
    const Config& c = config_of(p);
    return {c.block_q, c.block_kv};
}

/// Key blocks of a head of a dense call's sequence.
inline std::int64_t key_blocks(const Problem& p) {
    const int block_kv = config_of(p).block_kv;
    return (p.len_kv + block_kv - 1) / block_kv;
}

/// The most queries and keys of a sequence. The bounds of a ragged call may lie far beyond its tensors.
inline int most_queries(const Problem& p) {
    return static_cast<int>(p.ragged ? std::min(p.len_q, p.total_q) : p.len_q);
}
inline int most_keys(const Problem& p) {
    return static_cast<int>(p.ragged ? std::min(p.len_kv, p.total_kv) : p.len_kv);
}

/// Query blocks and key blocks of one head, over all sequences (first_block_q, first_block_kv). A ragged call counts as
/// many as its rows can need, whatever the bound on the lengths.
inline std::int64_t blocks_q(const Problem& p) {
    const int block = config_of(p).block_q;
    return p.ragged ? p.total_q / block + p.batch : p.batch * ((p.len_q + block - 1) / block);
}
inline std::int64_t blocks_kv(const Problem& p) {
    return p.ragged ? p.total_kv / config_of(p).block_kv + p.batch : p.batch * key_blocks(p);
}

/// Queries of a part in which a CTA has all query heads of a group.
inline int part_queries(const Problem& p) {
    return QueryParts::fitting(static_cast<int>(p.group()), QueryParts::max_terms(p.dtype));
}

/// Returns ask(schedule) for the BlockSchedule of a dense Problem's sequences.
template <class Ask>
auto ask_schedule(const Problem& p, const Ask& ask) {
    const auto of = [&](auto schedule) {
        schedule.set(p.mask, static_cast<int>(p.len_q), static_cast<int>(p.len_kv), static_cast<int>(p.group()));
        return ask(schedule);
    };
    const Config& c = config_of(p);
    if (c.splits_dv_dk()) return of(BlockSchedule<64, 64>{});
    return c.block_q == 128 ? of(BlockSchedule<128, 128>{}) : of(BlockSchedule<64, 128>{});
}

/// The most parts of queries of any sequence: launches of the main kernel.
inline int query_parts(const Problem& p) {
    const auto parts = [&](int head_splits) {
        return QueryParts(most_queries(p), part_queries(p) * head_splits).count();
    };
    if (p.ragged) return parts(1);
    return ask_schedule(p, [&](const auto& schedule) { return parts(schedule.head_splits); });
}

/// Accumulators of dQ in the workspace: 2 where a key block may wrap from the last query block to the first one
/// (dq_order.hpp), 0 where dQ has a kernel of its own.
inline int dq_accumulators(const Problem& p) {
    if (config_of(p).splits_dv_dk()) return 0;
    if (p.ragged) return 2;
    // Under a causal mask of equal lengths, key blocks start at the first queries that see them, or ascend.
    const bool square = p.mask.causal != Causal::none && p.len_q == p.len_kv;
    const bool aligned = p.mask.trivial() && p.group() == 1 && p.len_kv <= 128 * kMaxAlignedBlocks;
    return square || aligned ? 1 : 2;
}

/// The most head splits of any sequence; 1 where a CTA has all query heads of a group.
inline int head_splits(const Problem& p) {
    if (p.ragged) {
        return EvenHeadSplit::max_splits(p.mask, static_cast<int>(p.group()), most_keys(p), config_of(p).block_kv);
    }
    return ask_schedule(p, [](const auto& schedule) { return schedule.head_splits; });
}

/// Dense: are the longest key blocks of several heads launched before the shorter ones of any head? They are in the
/// ascending order, and under a causal mask if dQ has a kernel of its own.
inline bool starts_longest_first(const Problem& p) {
    if (p.mask.causal == Causal::none) return false;
    constexpr int kShort = 512;  // head by head is 2 to 4 % faster up to here
    if (config_of(p).splits_dv_dk()) return p.len_kv > kShort;
    return ask_schedule(p, [](const auto& schedule) { return schedule.ascending; });
}

/// Dense: are key blocks launched in segments (dq_order.hpp)?
inline bool uses_segments(const Problem& p) {
    return ask_schedule(p, [](const auto& schedule) { return schedule.segmented; });
}

/// The fewest key blocks of a call for which the last one to add to dQ also writes it. Its steps take longer, but they
/// overlap with many other CTAs, and dq_convert_kernel would read accumulators that have left the L2 cache.
inline constexpr std::int64_t kMinBlocksToWriteDq = 1024;

/// Does the key block that adds last write the finished dQ? The launch also needs rows of dQ that it can write by
/// vectors.
inline bool writes_dq(const Problem& p) {
    if (!config_of(p).may_write_dq() || p.ragged || uses_segments(p) || query_parts(p) > 1) return false;
    if (p.batch * p.heads_kv * key_blocks(p) < kMinBlocksToWriteDq) return false;
    return ask_schedule(p, [](const auto& schedule) { return schedule.first_block_adds_last(); });
}

/// Heads whose Q, dO, K, V and gradients fit the L2 cache: 24 MiB of the 50 MiB of an H100.
inline std::int64_t cached_heads(const Problem& p) {
    constexpr std::int64_t kBytes = std::int64_t{24} << 20;
    const std::int64_t dims = p.head_dim + p.head_dim_v;
    const std::int64_t head_bytes = p.len_q * (4 * p.head_dim + 2 * dims) + p.len_kv * 4 * dims;
    return std::max<std::int64_t>(kBytes / std::max<std::int64_t>(head_bytes, 1), 1);
}

/// cached_heads(), but at least as many heads of `blocks` CTAs as have 512 CTAs: some for each multiprocessor.
inline std::int64_t cached_heads_of_many_blocks(const Problem& p, std::int64_t blocks) {
    constexpr std::int64_t kMinBlocks = 512;
    return std::max(cached_heads(p), kMinBlocks / std::max<std::int64_t>(blocks, 1));
}

/// The rounds in which the key blocks of a dense call are launched.
inline KeyBlockRounds key_block_rounds(const Problem& p) {
    const Config& c = config_of(p);
    const std::int64_t heads = p.batch * p.heads_kv * head_splits(p);
    const std::int64_t blocks = key_blocks(p);
    const auto rounds = [&](std::int64_t segments, std::int64_t segment_size, std::int64_t heads_per_round) {
        return KeyBlockRounds{static_cast<int>(segments), static_cast<int>(segment_size),
                              static_cast<int>(std::min(heads_per_round, heads))};
    };
    // A segment for each block: heads take turns, the longest block of each first.
    if (starts_longest_first(p)) return rounds(blocks, 1, heads_longest_first(blocks, heads, c.splits_dv_dk()));
    if (c.splits_dv_dk()) return rounds(1, blocks, heads);
    if (uses_segments(p)) {
        constexpr std::int64_t kMaxBlocksInRounds = 32;  // heads with more blocks take turns all together
        return rounds(kSegments, segment_size<std::int64_t>(blocks, kSegments),
                      blocks > kMaxBlocksInRounds ? heads : cached_heads_of_many_blocks(p, blocks));
    }
    // Few blocks that start together: heads take turns, so that few blocks wait for each other at their start.
    if (p.mask.trivial() && p.group() == 1 && blocks <= kMaxAlignedBlocks) {
        return rounds(blocks, 1, cached_heads(p));
    }
    return rounds(1, blocks, heads);
}

/// Room for the items of a ragged call's list (key_block_list.hpp).
inline std::int64_t list_items(const Problem& p) { return blocks_kv(p) * head_splits(p); }

inline KeyBlockNumbering key_block_numbering(const Problem& p) {
    if (p.ragged) return KeyBlockNumbering::of_list(list_items(p), p.heads_kv, head_splits(p));
    return {p.batch, p.heads_kv, head_splits(p), key_block_rounds(p)};
}

/// Query tiles of a head, in the kernels whose outer loop is over queries. In a ragged call, of all its sequences.
inline std::int64_t query_tiles(const Problem& p) { return cuda::query_tiles(p, Config::kQueryTile); }

/// Query heads that take turns in the dQ kernel, where the longest tiles come first; else 1: head by head.
inline std::int64_t query_heads_per_round(const Problem& p) {
    constexpr std::int64_t kMinHeads = 16;
    const std::int64_t heads = query_heads(p);
    if (p.ragged) return p.mask.causal == Causal::none ? 1 : std::min(kMinHeads, heads);
    const bool longest_first = config_of(p).splits_dv_dk() && starts_longest_first(p);
    return std::min(longest_first ? std::max(cached_heads_of_many_blocks(p, query_tiles(p)), kMinHeads) : 1, heads);
}

inline QueryTileNumbering query_tile_numbering(const Problem& p) {
    return {query_heads(p), query_tiles(p), query_heads_per_round(p)};
}

}  // namespace tessera::cuda::fa3::backward
