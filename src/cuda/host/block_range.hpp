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
    int begin, end;
    int full_begin, full_end;  ///< every pair of these blocks is visible

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

}  // namespace tessera::cuda
