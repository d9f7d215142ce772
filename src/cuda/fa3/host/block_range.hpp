// SPDX-License-Identifier: Apache-2.0
//
// The part of a tile's key blocks that one warpgroup needs, and the mask of a partial block as bits. Plain C++, tested
// by block_range_test.
#pragma once

#include <cstdint>

#include "cuda/host/block_range.hpp"

namespace tessera::cuda::fa3 {

/// Columns 0, 1, 8, 9, 16, 17, ... of a row are one thread's, 32 at most (ptx/wgmma.cuh). The result has one bit for
/// each of them that lies in front of column `end`.
TESSERA_HOST_DEVICE inline std::uint32_t columns_before(int end) {
    const int from_0 = end < 0 ? 0 : end;
    const int pair = from_0 / 8 * 2;
    const int count = pair + (from_0 - pair * 4 < 2 ? from_0 - pair * 4 : 2);
    return count < 32 ? ~(0xFFFFFFFF << count) : 0xFFFFFFFF;
}

/// The blocks of `own` that lie in `tile`: at least one, which may be hidden from all of the rows of `own`.
TESSERA_HOST_DEVICE inline BlockRange part_of(const BlockRange& tile, BlockRange own) {
    if (own.end <= tile.begin) own.end = tile.begin + 1;
    if (own.end > tile.end) own.end = tile.end;
    if (own.begin >= own.end) own.begin = own.end - 1;
    if (own.begin < tile.begin) own.begin = tile.begin;
    return own;
}

}  // namespace tessera::cuda::fa3
