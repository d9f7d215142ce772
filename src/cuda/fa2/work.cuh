// SPDX-License-Identifier: Apache-2.0
//
// What one thread block works on: a tile of queries of one head, and the tiles of keys that it sees.
#pragma once

#include "cuda/fa2/launch.hpp"
#include "cuda/tile/member.cuh"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa2 {

/// The tiles of keys in the order of the work: first those that need mask code, at both ends of the band, then the full
/// ones between them.
struct KeyTiles {
    int first = 0;       // tile numbers: keys first * block_kv ...
    int full_begin = 0;  // full tiles are [full_begin, full_end)
    int full_end = 0;
    int partial = 0;  // how many there are of each
    int count = 0;

    /// A tile is full when its first key is not under the band of the last query, and its last key not over the band
    /// of the first one, nor past the end (Band::coverage, solved for the tile).
    __device__ KeyTiles(const Band& band, std::int64_t q_begin, std::int64_t q_end, int block_kv) {
        const Range keys = band.kv_range(q_begin, q_end);
        if (keys.empty()) return;
        const std::int64_t lowest = max(q_end - 1 + band.low, std::int64_t{0});
        const std::int64_t highest = max(min(q_begin + band.high + 1, band.len_kv), std::int64_t{0});
        first = static_cast<int>(keys.begin / block_kv);
        const int last = static_cast<int>((keys.end + block_kv - 1) / block_kv);
        full_begin = min(max(static_cast<int>((lowest + block_kv - 1) / block_kv), first), last);
        full_end = min(static_cast<int>(highest / block_kv), last);
        if (full_end <= full_begin) full_begin = full_end = last;
        count = last - first;
        partial = count - (full_end - full_begin);
    }

    /// Number of the tile at `step` of the work.
    __device__ __forceinline__ int at(int step) const {
        if (step >= partial) return full_begin + step - partial;
        const int before = full_begin - first;
        return step < before ? first + step : full_end + step - before;
    }
};

struct Work {
    Member member;
    std::int64_t batch = 0;
    int head = 0;
    int q_begin = 0;
    Band band;

    /// Tiles of queries go from last to first: the longest of a causal mask come first. Inside a group of heads, all
    /// heads come before the next tile; heads of one kv head are neighbours.
    __device__ Work(const Launch& launch, unsigned index, int block_q) {
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
        band = p.mask.bind(member.len_q, member.len_kv);
    }

    __device__ int q_end(int block_q) const { return min(q_begin + block_q, member.len_q); }
};

}  // namespace tessera::cuda::fa2
