// SPDX-License-Identifier: Apache-2.0
//
// Which compiled shape of the backward runs a Problem.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa3::backward {

/// Do scores go through more than a scale over 0 and the mask?
inline bool is_general(const Problem& p) { return changes_scores(p) || !scale_can_wait(p); }

/// The place in Shapes of the first one that holds a Problem; none: it is too large for them.
inline std::optional<std::size_t> shape_of(const Problem& p) {
    return Shapes::first([&](const Config& c) {
        return c.general == is_general(p) && p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim_v;
    });
}

/// The largest head_dim of shapes for such a Problem.
inline int largest_dim(const Problem& p) {
    int largest = 0;
    for (const Config& c : Shapes::kConfigs) {
        if (c.general == is_general(p)) largest = std::max(largest, c.head_dim);
    }
    return largest;
}

inline Tile tile_of(const Problem& p) {
    const Config& c = Shapes::kConfigs[*shape_of(p)];
    return {c.block_q, c.block_kv};
}

/// Sums of dQ in the workspace: 2 where a block of keys may go on from the last queries to the first ones (order.hpp);
/// none where dQ has a kernel of its own.
inline int sums_of_dq(const Problem& p) {
    if (Shapes::kConfigs[*shape_of(p)].roles()) return 0;
    if (p.ragged) return 2;
    // Under a causal mask of equal lengths, blocks start at the first queries that see them, or rise.
    const bool square = p.mask.causal != Causal::none && p.len_q == p.len_kv;
    const bool straight = p.mask.trivial() && p.group() == 1 && p.len_kv <= 128 * kMostStraight;
    return square || straight ? 1 : 2;
}

/// What `ask` says of the Blocks of a Problem (of a ragged one, of its largest sequence).
template <class Ask>
auto ask_blocks(const Problem& p, const Ask& ask) {
    const auto of = [&](auto blocks) {
        blocks.set(p.mask, static_cast<int>(p.len_q), static_cast<int>(p.len_kv), static_cast<int>(p.group()),
                   static_cast<int>(p.heads_kv));
        return ask(blocks);
    };
    const Config& c = Shapes::kConfigs[*shape_of(p)];
    if (c.roles()) return of(Blocks<64, 64>{});
    return c.block_q == 128 ? of(Blocks<128, 128>{}) : of(Blocks<64, 128>{});
}

/// The most shares that a group's query heads are in (Blocks::shares): 1 where a block of keys has them all.
inline int shares_of_groups(const Problem& p) {
    if (p.ragged) {
        return most_shares(p.mask, static_cast<int>(p.group()), static_cast<int>(p.heads_kv),
                           static_cast<int>(p.len_kv), Shapes::kConfigs[*shape_of(p)].block_kv);
    }
    return ask_blocks(p, [](const auto& blocks) { return blocks.shares; });
}

/// Do blocks of keys start by their length, whatever head they are of? Those that rise (of a ragged call, some
/// sequences' may), and under a causal mask those by roles, of which nobody waits.
inline bool goes_by_length(const Problem& p) {
    if (p.mask.causal == Causal::none) return false;
    constexpr int kShort = 512;  // head by head there: 2 to 4 % faster
    if (Shapes::kConfigs[*shape_of(p)].roles()) return p.len_kv > kShort;
    if (p.ragged) return p.group() > 1;
    return ask_blocks(p, [](const auto& blocks) { return blocks.rising; });
}

/// Does the block of keys that is the last to add make dQ of its sum (Blocks::ends_with_first)? Where rows of dQ can be
/// written by vectors.
inline bool finishes_dq(const Problem& p) {
    if (!Shapes::kConfigs[*shape_of(p)].may_finish() || p.ragged) return false;
    return ask_blocks(p, [](const auto& blocks) { return blocks.ends_with_first(); });
}

/// Do blocks of keys start in parts (Blocks::parted)? Of a ragged call, those of some sequences may.
inline bool starts_in_parts(const Problem& p) {
    if (p.ragged) {
        const std::int64_t most = (p.len_kv + 127) / 128;
        return may_start_in_parts(p.mask, static_cast<int>(p.group()), static_cast<int>(p.heads_kv),
                                  static_cast<int>(most));
    }
    return ask_blocks(p, [](const auto& blocks) { return blocks.parted; });
}

}  // namespace tessera::cuda::fa3::backward
