// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of keys a tile of queries needs. Plain C++, for every kernel with a tile of queries in its outer loop.
#pragma once

#include <cstdint>

#include "cuda/host/band32.hpp"

namespace tessera::cuda {

/// Blocks [begin, end) of a sequence's keys, some of which need no mask code. All other blocks are skipped: under a
/// causal mask, those past the tile's last query.
struct BlockRange {
    int begin = 0, end = 0;
    int full_begin = 0, full_end = 0;  ///< every pair of these blocks is visible

    TESSERA_HOST_DEVICE int count() const { return end - begin; }
    TESSERA_HOST_DEVICE bool contains(int n) const { return n >= begin && n < end; }
    TESSERA_HOST_DEVICE bool full(int n) const { return n >= full_begin && n < full_end; }
    /// Does block n hold a pair that is not visible?
    TESSERA_HOST_DEVICE bool partial(int n) const { return n < full_begin || n >= full_end; }
    TESSERA_HOST_DEVICE bool all_full() const { return full_begin <= begin && full_end >= end; }
};

/// The blocks that queries [begin, end) need; empty where they see no key. A block is full when the last query sees its
/// first key and the first query its last.
template <int kBlockKv>
TESSERA_HOST_DEVICE inline BlockRange blocks_of(int begin, int end, const Band32& band) {
    const auto smaller = [](int a, int b) { return a < b ? a : b; };
    const auto from_0 = [](int a) { return a < 0 ? 0 : a; };
    const int keys_begin = from_0(begin + band.low);
    const int keys_end = smaller(end + band.high, band.last_key + 1);
    const bool sees_keys = band.low <= band.high && keys_begin < keys_end;
    BlockRange blocks;
    blocks.begin = keys_begin / kBlockKv;
    blocks.end = sees_keys ? (keys_end + kBlockKv - 1) / kBlockKv : blocks.begin;
    blocks.full_begin = (from_0(end - 1 + band.low) + kBlockKv - 1) / kBlockKv;
    blocks.full_end = (smaller(begin + band.high, band.last_key) + 1) / kBlockKv;
    return blocks;
}

/// These blocks from a 64-bit Band, for kernels whose block size is no template argument. fa1, fa2, standard and
/// gradient take them in ascending order whatever the mask: a row then meets its keys in the same order in every tile,
/// and its bits do not depend on the rows around it.
TESSERA_HOST_DEVICE inline BlockRange blocks_of(const Band& band, std::int64_t q_begin, std::int64_t q_end,
                                                int block_kv) {
    const auto from_0 = [](std::int64_t a) { return a < 0 ? std::int64_t{0} : a; };
    const Range keys = band.kv_range(q_begin, q_end);
    if (keys.empty()) return {};
    const std::int64_t last = q_begin + band.high + 1;
    BlockRange blocks;
    blocks.begin = static_cast<int>(keys.begin / block_kv);
    blocks.end = static_cast<int>((keys.end + block_kv - 1) / block_kv);
    blocks.full_begin = static_cast<int>((from_0(q_end - 1 + band.low) + block_kv - 1) / block_kv);
    blocks.full_end = static_cast<int>(from_0(last < band.len_kv ? last : band.len_kv) / block_kv);
    return blocks;
}

}  // namespace tessera::cuda
