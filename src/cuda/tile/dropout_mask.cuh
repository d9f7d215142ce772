// SPDX-License-Identifier: Apache-2.0
//
// The dropout mask (core/dropout.hpp) in the layout of a warp's accumulators. Every lane draws one patch, and the lanes
// exchange bits until each has those of its own elements. Element e of tile j of 8 columns is row lane / 4 + 8 *
// (e / 2), column 8 * j + lane % 4 * 2 + e % 2.
#pragma once

#include <cstdint>

#include "core/dropout.hpp"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda {

/// The mask of kPatches whole patches. Each round draws one block of Philox for every patch, until no word equals the
/// threshold in the bits drawn so far. That takes mostly three rounds: 2^-12 of the words are equal then.
template <int kPatches>
__device__ __forceinline__ void draw_patches(std::uint32_t (&kept)[kPatches], const KeepRule& rule,
                                             const DropoutPatch (&patches)[kPatches]) {
    KeptBits bits[kPatches];
    std::uint32_t level = ~0U;
    // Not unrolled: under a GEMM, ptxas would put the wait for it in front of straight code.
#pragma unroll 1
    for (int block = 0; block < rule.blocks && level != 0; ++block) {
        PhiloxBlock words[kPatches];
#pragma unroll
        for (int i = 0; i < kPatches; ++i) words[i] = patches[i].counter(static_cast<std::uint32_t>(block));
#pragma unroll
        for (const auto& key : rule.keys.words) {
#pragma unroll
            for (PhiloxBlock& of_patch : words) of_patch = philox_round(of_patch, key);
        }
        level = 0;
#pragma unroll
        for (int i = 0; i < kPatches; ++i) {
            bits[i].add(KeptBits::of(words[i], rule.last_kept + dropout::kBitsOfBlock * block));
            level |= bits[i].level;
        }
    }
#pragma unroll
    for (int i = 0; i < kPatches; ++i) kept[i] = bits[i].kept;
}

/// Transposes bits between lanes: exchanges bit kLaneBit of the lane number with bit kBit of the bit number.
template <int kLaneBit, int kBit>
__device__ __forceinline__ std::uint32_t swap_with_lane(std::uint32_t bits, int lane) {
    constexpr std::uint32_t kClear[5] = {0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF};
    const bool set = (lane >> kLaneBit & 1) != 0;
    const std::uint32_t stays = set ? ~kClear[kBit] : kClear[kBit];
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, bits, 1 << kLaneBit);
    const std::uint32_t turned = __funnelshift_l(other, other, set ? 32 - (1 << kBit) : 1 << kBit);
    return (bits & stays) | (turned & ~stays);
}

/// A lane's part of the mask of 16 queries (the rows) by 64 keys: bit place(j, e) is that of element e of tile j.
struct DropoutBits {
    std::uint32_t bits = ~0U;

    __device__ __forceinline__ static constexpr int place(int j, int e) {
        return e / 2 * 16 + e % 2 * 8 + j % 2 * 4 + j / 2;
    }
    /// The rows begin at query `query` - lane / 4, a multiple of 16, and the keys at key / 64 * 64. Tile 0 is the one
    /// of key / 16 * 16. All lanes of the warp take part.
    __device__ __forceinline__ static DropoutBits draw(const KeepRule& rule, std::int64_t batch, int head, int query,
                                                       int key, int lane) {
        DropoutBits parts[1];
        draw(parts, rule, batch, head, query, key, lane);
        return {parts[0].bits >> (key / 16 % 4)};
    }
    /// Draws kParts times 64 keys at once, from key / 64 * 64 on.
    template <int kParts>
    __device__ __forceinline__ static void draw(DropoutBits (&parts)[kParts], const KeepRule& rule, std::int64_t batch,
                                                int head, int query, int key, int lane) {
        DropoutPatch patches[kParts];
        std::uint32_t bits[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            patches[i] = {.queries = static_cast<std::uint32_t>(query / 16 * 8 + lane / 4 % 2 * 4 + lane / 8),
                          .keys = static_cast<std::uint32_t>((key / 64 + i) * 4 + lane % 4),
                          .head = static_cast<std::uint32_t>(head),
                          .batch = static_cast<std::uint32_t>(batch)};
        }
        draw_patches(bits, rule, patches);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            bits[i] = swap_with_lane<0, 0>(bits[i], lane);  // keys: 16 of the patch, and 2 of the element
            bits[i] = swap_with_lane<1, 1>(bits[i], lane);  // 32, and 4
            bits[i] = swap_with_lane<2, 4>(bits[i], lane);  // queries: 8, and 1
            parts[i] = {bits[i]};
        }
    }
    __device__ __forceinline__ bool operator()(int j, int e) const { return (bits >> place(j, e) & 1) != 0; }
};

/// A lane's part of the mask of a transposed tile: 16 keys (the rows) by 64 queries.
struct DropoutBitsTransposed {
    std::uint32_t bits = ~0U;

    __device__ __forceinline__ static constexpr int place(int j, int e) {
        return e % 2 * 16 + j % 2 * 8 + e / 2 * 4 + j / 2;
    }
    /// The rows begin at key `key` - lane / 4, a multiple of 16, and the queries at query / 64 * 64. Tile 0 is the one
    /// of query / 16 * 16.
    __device__ __forceinline__ static DropoutBitsTransposed draw(const KeepRule& rule, std::int64_t batch, int head,
                                                                 int query, int key, int lane) {
        const int own = lane / 4 % 2 * 4 + lane / 8 % 2 * 8 + lane / 16 * 16;  // 0..31: a pair of queries
        const DropoutPatch patch[1] = {{.queries = static_cast<std::uint32_t>(query / 64 * 32 + own + lane % 4),
                                        .keys = static_cast<std::uint32_t>(key / 16),
                                        .head = static_cast<std::uint32_t>(head),
                                        .batch = static_cast<std::uint32_t>(batch)}};
        std::uint32_t drawn[1];
        draw_patches(drawn, rule, patch);
        std::uint32_t bits = drawn[0];
        bits = swap_with_lane<2, 3>(bits, lane);  // queries: 8 of the patch, and keys: 1 of the element
        bits = swap_with_lane<3, 0>(bits, lane);  // 16, and 2
        bits = swap_with_lane<4, 1>(bits, lane);  // 32, and 4
        return {bits >> (query / 16 % 4)};
    }
    __device__ __forceinline__ bool operator()(int j, int e) const { return (bits >> place(j, e) & 1) != 0; }
};

/// The mask of kCount consecutive keys, from a multiple of kCount on: bit i is that of key + i.
template <int kCount>
__device__ __forceinline__ std::uint32_t kept_keys(const KeepRule& rule, std::int64_t batch, int head, int query,
                                                   int key) {
    static_assert(dropout::kPatchKeys % kCount == 0);
    std::uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) wanted |= 1U << bit_in_patch(query, key + i);
    const std::uint32_t drawn = kept_weights(rule, dropout_patch(batch, head, query, key), wanted);
    std::uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) kept |= (drawn >> bit_in_patch(query, key + i) & 1) << i;
    return kept;
}

/// Is the probability of this pair kept?
__device__ __forceinline__ bool is_kept(const KeepRule& rule, std::int64_t batch, int head, int query, int key) {
    const int place = bit_in_patch(query, key);
    return (kept_weights(rule, dropout_patch(batch, head, query, key), 1U << place) >> place & 1) != 0;
}

}  // namespace tessera::cuda
