// SPDX-License-Identifier: Apache-2.0
//
// A model of how long the tiles of a call keep the multiprocessors busy. The dispatch uses it to choose the faster of
// two tile shapes, which give the same bits. Plain C++, tested by makespan_test.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arena.hpp"
#include "cuda/fa3/host/block_range.hpp"
#include "cuda/host/query_tiles.hpp"

namespace tessera::cuda::fa3 {

/// Multiprocessors of an H100 SXM or H200. On a smaller GPU the choice may be the slower one; no bit depends on it.
inline constexpr int kMultiprocessors = 132;

/// Microseconds that a tile of `queries` queries takes.
struct TileCost {
    int queries;
    double block;  ///< per block of 128 keys
    double ends;   ///< prologue and epilogue
};

/// Times of the tiles of one head, in the order in which they are scheduled: from the last queries, which see the most
/// keys, to the first.
class HeadTileTimes {
 public:
    HeadTileTimes(const Problem& p, const TileCost& cost)
        : cost_(cost), len_q_(static_cast<int>(p.len_q)), band_(p.mask.bind(p.len_q, p.len_kv)) {}
    int tiles() const { return (len_q_ + cost_.queries - 1) / cost_.queries; }
    /// Microseconds of tile `index` in that order.
    double operator[](int index) const {
        const int begin = (tiles() - 1 - index) * cost_.queries;
        const BlockRange blocks = blocks_of<128>(begin, std::min(begin + cost_.queries, len_q_), band_);
        return cost_.ends + cost_.block * blocks.count();
    }

 private:
    TileCost cost_;
    int len_q_;
    Band32 band_;
};

/// Lower bound on the makespan of a dense call in microseconds, under longest-tile-first dynamic scheduling. It is the
/// largest of: the longest tile; total work / multiprocessors; and for each k, t[k * SMs - 1] + k * t[k * SMs], since
/// some thread block runs k + 1 of the first k * SMs + 1 tiles. The measured time is little over it. Meant for calls of
/// few tiles (makespan_decides).
inline double makespan(const Problem& p, const TileCost& cost, int multiprocessors = kMultiprocessors) {
    const HeadTileTimes head(p, cost);
    const std::int64_t heads = query_heads(p);
    double work = 0;
    for (int i = 0; i < head.tiles(); ++i) work += head[i];
    double time = std::max(head[0], static_cast<double>(heads) * work / multiprocessors);
    const auto time_of = [&](std::int64_t tile) { return head[static_cast<int>(tile / heads)]; };
    std::int64_t rounds = 1;
    for (std::int64_t tile = multiprocessors; tile < heads * head.tiles(); tile += multiprocessors, ++rounds) {
        time = std::max(time, time_of(tile - 1) + static_cast<double>(rounds) * time_of(tile));
    }
    return time;
}

/// Does makespan() decide this call's shape? It was compared with a GPU for dense calls of few tiles, causal or without
/// a mask. It does not decide two kinds of such calls:
///   - causal calls whose first query sees more than the first key: all their tiles are long and end in rounds, which
///     the bound does not describe well;
///   - calls with few queries: a warpgroup skips the rows that a tile of 192 does not have, and PackGQA may apply.
inline bool makespan_decides(const Problem& p, const TileCost& cost) {
    const bool even = p.mask.trivial();
    const int most_rounds = even ? 6 : 3;
    const int few_queries = p.group() == 1 ? 64 : 512;
    const bool causal_only = p.mask.causal != Causal::none && p.mask.window_left == unbounded;
    const bool from_the_first = causal_only && p.mask.bind(p.len_q, p.len_kv).high <= 0;
    return !p.ragged && (even || from_the_first) && query_heads(p) > 0 && p.len_q > few_queries &&
           saturating_product(query_heads(p), query_tiles(p, cost.queries)) <= most_rounds * kMultiprocessors;
}

}  // namespace tessera::cuda::fa3
