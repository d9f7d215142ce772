// SPDX-License-Identifier: Apache-2.0
//
// Dropout: which weights of a block of keys are kept, a bit each, drawn before the weights are there.
#pragma once

#include <cstdint>

#include "core/philox_rounds.hpp"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
#include "cuda/ptx/bits.cuh"

namespace tessera::cuda::fa3 {

/// Which of the weights of two rows and a block of 64 or 128 keys dropout keeps: key 8 * j + e of 64 (e = 0, 1: a
/// lane's own) is bit 7 - j of byte e; bytes 2 and 3 are those of the next 64.
struct KeptWeights {
    std::uint32_t row[2];
};

/// Two 16-bit weights of neighbouring keys, elements i and i + 1 of an accumulator: dropped ones become 0.
__device__ __forceinline__ std::uint32_t drop_weights(const KeptWeights& kept, std::uint32_t weights, int i) {
    const int columns = i / 4;
    const std::uint32_t bits = kept.row[row_of(i)] << columns % 8;
    return weights & (columns < 8 ? ptx::byte_signs<0, 1>(bits) : ptx::byte_signs<2, 3>(bits));
}

/// What a thread of a consumer needs of the mask for kBlockKv keys from `first_key` on; `query`: of its first row. All
/// lanes of the warp together.
///
/// The weights of 8 keys lie in four lanes, two neighbouring keys in each, and one Philox block serves the four keys of
/// two lanes. So the even lane draws for the upper row, the odd lane for the lower one, and they exchange what the
/// other one needs, all bits of the block of keys at once.
template <int kBlockKv>
__device__ __forceinline__ KeptWeights draw_kept(const Launch& launch, const WorkTile& tile, int query, int first_key,
                                                 int lane) {
    static_assert(kBlockKv == 64 || kBlockKv == 128);
    constexpr int kParts = kBlockKv / 64;
    constexpr int kAtOnce = 4;  // Philox blocks: one alone would wait for itself most of the time
    const bool lower = lane % 2 != 0;
    const auto row = static_cast<std::uint32_t>(lower ? query + 8 : query);
    const auto head = static_cast<std::uint32_t>(tile.head);
    const auto batch = static_cast<std::uint32_t>(tile.batch);
    const auto quad = static_cast<std::uint32_t>(first_key / 4 + lane % 4 / 2);
    const auto last_kept = static_cast<std::uint32_t>(launch.params.keep_threshold - 1);
    std::uint32_t even = 0;
    std::uint32_t odd = 0;
    // Not unrolled: under a product, the assembler would put the wait for it in front of straight code.
#pragma unroll 1
    for (std::uint32_t first = 0; first < 8; first += kAtOnce / kParts) {
        PhiloxBlock blocks[kAtOnce];
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
            blocks[i] = {quad + 2 * (first + i / kParts) + i % kParts * 16, row, head, batch};
        }
#pragma unroll
        for (const auto& key : launch.keys.words) {
#pragma unroll
            for (PhiloxBlock& block : blocks) block = philox_round(block, key);
        }
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
            const std::uint32_t part = i % kParts;
            if (part == 0) {
                even <<= 1;
                odd <<= 1;
            }
            ptx::add_if_at_most(even, 1U << (16 * part), blocks[i][0], last_kept);
            ptx::add_if_at_most(even, 1U << (16 * part + 8), blocks[i][1], last_kept);
            ptx::add_if_at_most(odd, 1U << (16 * part), blocks[i][2], last_kept);
            ptx::add_if_at_most(odd, 1U << (16 * part + 8), blocks[i][3], last_kept);
        }
    }
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, lower ? even : odd, 1);
    return {{lower ? other : even, lower ? odd : other}};
}

}  // namespace tessera::cuda::fa3
