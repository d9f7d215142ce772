// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// The tiles of keys that a tile of queries sees; all others are skipped (under a causal mask, those past its last
/// query). They come in ascending order whatever the mask: a row then meets its keys in
/// the same order in every tile of queries that it may be part of, and its bits do not depend on the rows around it.
struct KeyTiles {
    int first = 0;  // tile numbers: keys first * block_kv ...
    int end = 0;
    int full_begin = 0;  // tiles [full_begin, full_end) need no mask code
    int full_end = 0;

    KeyTiles() = default;
    /// A tile is full when its first key is not under the band of the last query, and its last key not over the band
    /// of the first one, nor past the end (Band::coverage, solved for the tile).
    __device__ KeyTiles(const Band& band, std::int64_t q_begin, std::int64_t q_end, int block_kv) {
        const Range keys = band.kv_range(q_begin, q_end);
        if (keys.empty()) return;
        const std::int64_t lowest = max(q_end - 1 + band.low, std::int64_t{0});
        const std::int64_t highest = max(min(q_begin + band.high + 1, band.len_kv), std::int64_t{0});
        first = static_cast<int>(keys.begin / block_kv);
        end = static_cast<int>((keys.end + block_kv - 1) / block_kv);
        full_begin = static_cast<int>((lowest + block_kv - 1) / block_kv);
        full_end = static_cast<int>(highest / block_kv);
    }

    __device__ __forceinline__ bool holds(int tile) const { return tile >= first && tile < end; }
    __device__ __forceinline__ int count() const { return end - first; }
    __device__ __forceinline__ bool all_full() const { return full_begin <= first && full_end >= end; }
    __device__ __forceinline__ bool full(int tile) const { return tile >= full_begin && tile < full_end; }
};

}  // namespace tessera::cuda
