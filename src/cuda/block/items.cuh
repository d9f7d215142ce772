// SPDX-License-Identifier: Apache-2.0
//
// The splits of the keys, dealt to the CTAs of the one launch by their index. A sequence has as many splits as
// cuda.decode.forward gives it; one with no key to see has one empty split, whose CTA writes the new key.
#pragma once

#include "cuda/block/shared.cuh"

namespace tessera::cuda::block {

/// A split of the keys of one kv head of a sequence, for up to 16 of its query heads.
struct Item {
    int member;
    int kv_head;
    int first_row;  ///< of the kv head's query heads
    int rows;
    int split;    ///< its number among the row's splits
    bool newest;  ///< does it have the new key, or an empty split that has to write it?
    bool writes;  ///< does it write the new key to the cache?
    Span keys;    ///< empty where the sequence sees none
    int tile;     ///< first key of the first tile: a multiple of 64

    __device__ __forceinline__ int tiles() const {
        return keys.count() <= 0 ? 0 : (keys.end - tile + decode::Config::kKeys - 1) / decode::Config::kKeys;
    }
    /// The key at which the new one is copied into the tiles; -1 if none.
    __device__ __forceinline__ int new_key() const { return newest && keys.count() > 0 ? keys.end - 1 : -1; }
};

/// Tiles of query heads of a kv head.
__device__ __forceinline__ int row_tiles(const Launch& launch) {
    return (launch.attention.params.group + Config::kRowsOfTile - 1) / Config::kRowsOfTile;
}

/// Finds out about the sequences. By one warp.
template <class Shape>
__device__ __forceinline__ void find_members(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const decode::Launch& attention = launch.attention;
    const decode::Cache& cache = attention.cache;
    const ForwardParams& p = attention.params;
    const int b = block.lane;
    int items = 0;
    if (b < launch.batch) {
        Member member;
        const int before = cache.lengths[b * cache.lengths_step];
        const int length = min(max(before == INT_MAX ? before : before + 1, 0), p.len_kv);
        const int padding = cache.padding == nullptr ? 0 : min(max(cache.padding[b * cache.padding_step], 0), length);
        member.slot = b;
        if (cache.slots != nullptr) member.slot = cache.slots[b * cache.slots_step];
        const bool exists = cache.pages != nullptr || (member.slot >= 0 && member.slot < cache.count);
        const Sequence sequence{0, padding, 1, exists ? length - padding : 0};
        member.first_kv = padding;
        member.visible = decode::visible_of(decode::band_of(attention, sequence), 0);
        member.splits = decode::Splits(member.visible);
        member.place = append_rows::place_of(launch.append, b);
        items = max(member.splits.count, 1) * row_tiles(launch) * p.heads_kv;
        block.shared.members[b] = member;
    }
#pragma unroll
    for (int step = 1; step < Config::kMostBatch; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, items, step);
        if (b >= step) items += other;
    }
    if (b < launch.batch) block.shared.members[b].end = items;
}

/// Copies what the norm and the rotary embedding of the heads need into shared memory, by the warp that has found the
/// members.
template <class Shape>
__device__ __forceinline__ void read_tables(const Block<Shape>& block) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    const append_rows::Launch& append = block.launch.append;
    __syncwarp();
    for (int b = 0; b < block.launch.batch && append.pairs > 0; ++b) {
        const std::int64_t row = append_rows::rotary_row(append, block.shared.members[b].place.position);
#pragma unroll
        for (int i = 0; i < kHeadDim / 64; ++i) {
            const int n = block.lane + 32 * i;
            if (n < append.pairs)
                block.shared.rotary[b][n] = {static_cast<float>(append_rows::read<Element>(append.cos, row, n)),
                                             static_cast<float>(append_rows::read<Element>(append.sin, row, n))};
        }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const append_rows::Numbers& norm = which == 0 ? append.q_norm : append.k_norm;
        if (norm.data == nullptr) continue;
        for (int c = block.lane; c < kHeadDim; c += 32)
            block.shared.norms[which][c] = static_cast<float>(append_rows::read<Element>(norm, 0, c));
    }
}

/// Item `index` of all sequences.
template <class Shape>
__device__ __forceinline__ Item find_item(const Block<Shape>& block, int index) {
    const Launch& launch = block.launch;
    const ForwardParams& p = launch.attention.params;
    Item item{};
    while (block.shared.members[item.member].end <= index) ++item.member;
    if (item.member > 0) index -= block.shared.members[item.member - 1].end;
    const Member& member = block.shared.members[item.member];
    const int of_tiles = launch.attention.heads_kv.quotient(index), tiles = row_tiles(launch);
    item.kv_head = index - of_tiles * p.heads_kv;
    const int from_last = of_tiles / tiles, tile = of_tiles - from_last * tiles;
    const int splits = max(member.splits.count, 1);
    item.split = splits - 1 - from_last;
    item.first_row = tile * Config::kRowsOfTile;
    item.rows = min(p.group - item.first_row, Config::kRowsOfTile);
    item.newest = from_last == 0 && member.place.slot >= 0;
    item.writes = item.newest && tile == 0;
    if (member.splits.count > 0) {
        const int number = member.splits.first + item.split;
        item.keys = {max(number << member.splits.shift, member.visible.begin),
                     min((number + 1) << member.splits.shift, member.visible.end)};
        item.tile = item.keys.begin / decode::Config::kKeys * decode::Config::kKeys;
    }
    return item;
}

/// The items of a CTA are first_item(), and every gridDim.x-th behind it. The items with new keys, which wait longest
/// for their data, come first and go to the last CTAs, which have no more rows of weights than others.
__device__ __forceinline__ int first_item() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

template <class Shape>
__device__ __forceinline__ int items_of_all(const Block<Shape>& block) {
    return block.shared.members[block.launch.batch - 1].end;
}

}  // namespace tessera::cuda::block
