// SPDX-License-Identifier: Apache-2.0
//
// Dropout: the mask of a block of keys, one bit for each probability, generated before the probabilities are computed.
#pragma once

#include <cstdint>

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/ptx/bits.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dropout_mask.cuh"

namespace tessera::cuda::fa3 {

/// The dropout mask of a thread's probabilities: two rows and a block of 64 or 128 keys, 64 keys a part.
template <int kBlockKv>
struct DropoutMask {
    static_assert(kBlockKv == 64 || kBlockKv == 128);
    DropoutBits part[kBlockKv / 64];
};

/// Sets dropped probabilities to 0, among two 16-bit ones of neighbouring keys: elements i and i + 1 of an accumulator.
template <int kBlockKv>
__device__ __forceinline__ std::uint32_t drop_probabilities(const DropoutMask<kBlockKv>& kept,
                                                            std::uint32_t probabilities, int i) {
    const int column = i / 4;  // tile of 8 keys
    // The mask bits of both rows, in one byte for each of the two keys, become the bytes' signs.
    const std::uint32_t bits = kept.part[column / 8].bits << (7 - DropoutBits::place(column % 8, 0));
    return probabilities & (row_of(i) == 0 ? ptx::byte_signs<0, 1>(bits) : ptx::byte_signs<2, 3>(bits));
}

/// A consumer thread's part of the mask for kBlockKv keys from `first_key` on; `query` is that of its first row. All
/// lanes of the warp take part.
template <int kBlockKv>
__device__ __forceinline__ DropoutMask<kBlockKv> draw_dropout_mask(const Launch& launch, const WorkTile& tile,
                                                                   int query, int first_key, int lane) {
    DropoutMask<kBlockKv> kept;
    // Opaque: values derived from them are computed anew, so that they take no registers over the loop.
    DropoutBits::draw(kept.part, launch.params.keep, tile.batch, ptx::opaque(tile.head), ptx::opaque(query), first_key,
                      ptx::opaque(lane));
    return kept;
}

}  // namespace tessera::cuda::fa3
