// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of keys some queries need. Plain C++, with tests in tests/cuda_host/block_range_test.cc.
#pragma once

#include <cstdint>

#include "cuda/host/divider.hpp"

namespace tessera::cuda::fa3 {

/// Blocks of a sequence's keys that some of its queries need; they are taken from the last to the first.
struct BlockRange {
    int begin, end;
    int full_begin, full_end;  ///< of these, the blocks whose every pair is visible

    TESSERA_HOST_DEVICE int count() const { return end - begin; }
    /// Does block n hold a pair that is not visible?
    TESSERA_HOST_DEVICE bool partial(int n) const { return n < full_begin || n >= full_end; }
};

/// Key k is visible to query q if q + low <= k <= q + high and k <= last_key.
struct Visibility {
    int low, high, last_key;
};

/// What queries [begin, end) need. Blocks whose keys none of them sees are skipped: under a causal mask, those past the
/// last query. Empty where no key is seen at all.
template <int kBlockKv>
TESSERA_HOST_DEVICE inline BlockRange blocks_of(int begin, int end, const Visibility& visible) {
    const auto least = [](int a, int b) { return a < b ? a : b; };
    const auto from_0 = [](int a) { return a < 0 ? 0 : a; };
    const int keys_begin = from_0(begin + visible.low);
    const int keys_end = least(end + visible.high, visible.last_key + 1);
    const bool sees_keys = visible.low <= visible.high && keys_begin < keys_end;
    BlockRange blocks;
    blocks.begin = keys_begin / kBlockKv;
    blocks.end = sees_keys ? (keys_end + kBlockKv - 1) / kBlockKv : blocks.begin;
    // Full: the last query sees the first key of the block, and the first query its last.
    blocks.full_begin = (from_0(end - 1 + visible.low) + kBlockKv - 1) / kBlockKv;
    blocks.full_end = (least(begin + visible.high, visible.last_key) + 1) / kBlockKv;
    return blocks;
}

/// Columns 0, 1, 8, 9, 16, 17, ... of a row are a thread's, 32 at most (ptx/wgmma.cuh). A bit for each of them that
/// lies in front of column `end`.
TESSERA_HOST_DEVICE inline std::uint32_t columns_before(int end) {
    const int from_0 = end < 0 ? 0 : end;
    const int pair = from_0 / 8 * 2;
    const int count = pair + (from_0 - pair * 4 < 2 ? from_0 - pair * 4 : 2);
    return count < 32 ? ~(0xFFFFFFFF << count) : 0xFFFFFFFF;
}

/// Of a tile's blocks, those of some of its queries: one at least, which may be hidden from all of them.
TESSERA_HOST_DEVICE inline BlockRange part_of(const BlockRange& tile, BlockRange own) {
    if (own.end <= tile.begin) own.end = tile.begin + 1;
    if (own.end > tile.end) own.end = tile.end;
    if (own.begin >= own.end) own.begin = own.end - 1;
    if (own.begin < tile.begin) own.begin = tile.begin;
    return own;
}

}  // namespace tessera::cuda::fa3
