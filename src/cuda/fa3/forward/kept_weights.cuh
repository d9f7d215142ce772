// SPDX-License-Identifier: Apache-2.0
//
// Dropout: which weights of a block of keys are kept, a bit each, drawn before the weights are there.
#pragma once

#include <cstdint>

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/ptx/bits.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/kept_weights.cuh"

namespace tessera::cuda::fa3 {

/// Which of a thread's weights of two rows and a block of 64 or 128 keys dropout keeps, 64 keys a part.
template <int kBlockKv>
struct KeptWeights {
    static_assert(kBlockKv == 64 || kBlockKv == 128);
    KeptOfRows part[kBlockKv / 64];
};

/// Two 16-bit weights of neighbouring keys, elements i and i + 1 of an accumulator: dropped ones become 0.
template <int kBlockKv>
__device__ __forceinline__ std::uint32_t drop_weights(const KeptWeights<kBlockKv>& kept, std::uint32_t weights, int i) {
    const int column = i / 4;  // of tiles of 8
    // The place in both rows' bytes, one for each of the two keys, becomes the byte's sign.
    const std::uint32_t bits = kept.part[column / 8].bits << (7 - KeptOfRows::place(column % 8, 0));
    return weights & (row_of(i) == 0 ? ptx::byte_signs<0, 1>(bits) : ptx::byte_signs<2, 3>(bits));
}

/// What a thread of a consumer needs of the mask for kBlockKv keys from `first_key` on; `query`: of its first row. All
/// lanes of the warp together.
template <int kBlockKv>
__device__ __forceinline__ KeptWeights<kBlockKv> draw_kept(const Launch& launch, const WorkTile& tile, int query,
                                                           int first_key, int lane) {
    KeptWeights<kBlockKv> kept;
    // Opaque: what follows from them is made anew, so that no register is kept for it over the loop.
    KeptOfRows::draw(kept.part, launch.params.keep, tile.batch, ptx::opaque(tile.head), ptx::opaque(query), first_key,
                     ptx::opaque(lane));
    return kept;
}

}  // namespace tessera::cuda::fa3
