// SPDX-License-Identifier: Apache-2.0
//
// What one thread block works on: a tile of queries of one head, and the tiles of keys that it sees.
#pragma once

#include "cuda/fa2/launch.hpp"
#include "cuda/tile/member.cuh"
#include "cuda/tile/score.cuh"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa2 {

/// The tiles of keys that a tile of queries sees, in the order of the work: from the first key to the last, whatever
/// the mask, so that a row meets its keys in the same order in every tile of queries that it may be part of.
struct KeyTiles {
    int first = 0;  // tile numbers: keys first * block_kv ...
    int count = 0;
    int full_begin = 0;  // [full_begin, full_end) need no mask code
    int full_end = 0;
    int run_begin = 0;  // steps of the work, from 0: in [run_begin, run_end) the tile is full, and the next one, if
    int run_end = 0;    // there is one, is whole and can be read 16 bytes at a time

    KeyTiles() = default;
    /// A tile is full when its first key is not under the band of the last query, and its last key not over the band
    /// of the first one, nor past the end (Band::coverage, solved for the tile).
    __device__ KeyTiles(const Band& band, std::int64_t q_begin, std::int64_t q_end, int block_kv, bool vector) {
        const Range keys = band.kv_range(q_begin, q_end);
        if (keys.empty()) return;
        const std::int64_t lowest = max(q_end - 1 + band.low, std::int64_t{0});
        const std::int64_t highest = max(min(q_begin + band.high + 1, band.len_kv), std::int64_t{0});
        first = static_cast<int>(keys.begin / block_kv);
        count = static_cast<int>((keys.end + block_kv - 1) / block_kv) - first;
        full_begin = static_cast<int>((lowest + block_kv - 1) / block_kv);
        full_end = static_cast<int>(highest / block_kv);
        const int whole = static_cast<int>(band.len_kv / block_kv) - first;
        run_begin = max(full_begin - first, 0);
        run_end = min(full_end - first, whole < count ? whole - 1 : count);
        if (!vector || run_end < run_begin) run_end = run_begin;
    }

    __device__ __forceinline__ bool full(int tile) const { return tile >= full_begin && tile < full_end; }
    __device__ __forceinline__ bool all_full() const { return full_begin <= first && full_end >= first + count; }
};

struct Work {
    Member member;
    std::int64_t batch = 0;
    int head = 0;
    int q_begin = 0;
    const char* k = nullptr;  // row 0 of the head
    const char* v = nullptr;
    Visible visible;
    KeyTiles tiles;

    /// Tiles of queries go from last to first: the longest of a causal mask come first. Inside a group of heads, all
    /// heads come before the next tile; heads of one kv head are neighbours.
    __device__ Work(const Launch& launch, unsigned index, int block_q, int block_kv, int element_bytes) {
        const ForwardParams& p = launch.params;
        const std::int64_t pairs = p.batch * p.heads_q;
        const std::int64_t of_group = static_cast<std::int64_t>(launch.heads_together) * launch.q_blocks;
        const std::int64_t first_pair = index / of_group * launch.heads_together;
        const auto in_group = static_cast<unsigned>(index % of_group);
        const auto heads =
            static_cast<unsigned>(min(pairs - first_pair, static_cast<std::int64_t>(launch.heads_together)));
        const std::int64_t pair = first_pair + in_group % heads;
        batch = pair / p.heads_q;
        head = static_cast<int>(pair % p.heads_q);
        q_begin = (launch.q_blocks - 1 - static_cast<int>(in_group / heads)) * block_q;
        member = member_of(p, batch);
        k = p.k.data + head_offset(p.k, batch, member.first_kv, head / p.group, element_bytes);
        v = p.v.data + head_offset(p.v, batch, member.first_kv, head / p.group, element_bytes);
        const Band band = p.mask.bind(member.len_q, member.len_kv);
        visible = Visible(band);
        if (q_begin < member.len_q)
            tiles = KeyTiles(band, q_begin, min(q_begin + block_q, member.len_q), block_kv,
                             launch.vector_k && launch.vector_v);
    }
};

}  // namespace tessera::cuda::fa2
