// SPDX-License-Identifier: Apache-2.0
//
// How long the tiles of a call keep the multiprocessors busy: a model, by which one of two shapes is chosen that give
// the same bits. Plain C++, with tests in tests/cuda_host/makespan_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arena.hpp"
#include "cuda/fa3/host/block_range.hpp"
#include "cuda/host/query_tiles.hpp"

namespace tessera::cuda::fa3 {

/// Of an H100 or H200. A GPU with fewer may be given the slower one of two shapes; no bit depends on it.
inline constexpr int kMultiprocessors = 132;

/// What a tile of so many queries and blocks of 128 keys costs a thread block, in microseconds: each block of keys, and
/// the ends.
struct TilePrice {
    int queries;
    double block, ends;
};

/// Time of the tiles of one head. They are taken from the last queries, which see the most keys, to
/// the first.
class HeadTime {
 public:
    HeadTime(const Problem& p, const TilePrice& price) : price_(price), len_q_(static_cast<int>(p.len_q)) {
        const Band band = p.mask.bind(p.len_q, p.len_kv);
        visible_ = {static_cast<int>(band.low), static_cast<int>(band.high), static_cast<int>(p.len_kv) - 1};
    }
    int tiles() const { return (len_q_ + price_.queries - 1) / price_.queries; }
    /// Of a tile, by its place in the order of the work.
    double operator[](int place) const {
        const int begin = (tiles() - 1 - place) * price_.queries;
        const BlockRange blocks = blocks_of<128>(begin, std::min(begin + price_.queries, len_q_), visible_);
        return price_.ends + price_.block * blocks.count();
    }

 private:
    TilePrice price_;
    int len_q_;
    Visibility visible_{};
};

/// A dense call, whose tiles go to whoever is free, the longest first. It can't end before its longest tile
/// does; nor before all work would if it were spread evenly; nor, since with `multiprocessors` times k tiles and one
/// more some thread block has k + 1 of them, before so many of the shortest one among these. (Of two it is no more than
/// the shortest and the one before.) It ends little later. For calls of which
/// queue_decides(): their tiles are few.
inline double queue_time(const Problem& p, const TilePrice& price, int multiprocessors = kMultiprocessors) {
    const HeadTime head(p, price);
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

/// Is the model asked? Of dense calls without a mask and causal ones of few tiles, for which it was compared with a
/// GPU. Not where the first query of a causal call sees keys behind the first: tiles that are all long, and not alike,
/// end in rounds, of which the model knows too little. Nor of few queries: a warpgroup skips those that a tile of
/// 192 does not have, and where heads share K and V they may be stacked.
inline bool queue_decides(const Problem& p, const TilePrice& price) {
    const bool even = p.mask.trivial();
    const int most_rounds = even ? 6 : 3;
    const int few_queries = p.group() == 1 ? 64 : 512;
    const bool causal_only = p.mask.causal != Causal::none && p.mask.window_left == unbounded;
    const bool from_the_first = causal_only && p.mask.bind(p.len_q, p.len_kv).high <= 0;
    return !p.ragged && (even || from_the_first) && query_heads(p) > 0 && p.len_q > few_queries &&
           saturating_product(query_heads(p), query_tiles(p, price.queries)) <= most_rounds * kMultiprocessors;
}

}  // namespace tessera::cuda::fa3
