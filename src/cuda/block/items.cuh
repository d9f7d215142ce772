// SPDX-License-Identifier: Apache-2.0
//
// The splits of the keys, and which CTA of the one launch computes which. A sequence has as many splits as
// cuda.decode.forward gives it. If its query sees no key, it has one empty split, whose CTA writes the new key.
#pragma once

#include "cuda/block/shared.cuh"

namespace tessera::cuda::block {

/// A split of the keys of one kv head of a sequence, for up to 16 of its query heads.
struct Item {
    int sequence;
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

/// Reads the lengths of the sequences, and writes their visible keys and splits to shared memory. By one warp.
template <class Shape>
__device__ __forceinline__ void find_sequences(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const decode::Launch& attention = launch.attention;
    const Cache& cache = attention.cache;
    const ForwardParams& p = attention.params;
    const int b = block.lane;
    int items = 0;
    if (b < launch.batch) {
        SequenceWork of_sequence;
        const int before = cache.lengths[b * cache.lengths_step];
        const int length = min(max(before == INT_MAX ? before : before + 1, 0), p.len_kv);
        const int padding = cache.padding == nullptr ? 0 : min(max(cache.padding[b * cache.padding_step], 0), length);
        of_sequence.slot = b;
        if (cache.slots != nullptr) of_sequence.slot = cache.slots[b * cache.slots_step];
        const bool exists = cache.pages != nullptr || (of_sequence.slot >= 0 && of_sequence.slot < cache.count);
        const Sequence sequence{0, padding, 1, exists ? length - padding : 0};
        of_sequence.first_kv = padding;
        of_sequence.visible = decode::visible_of(decode::band_of(attention, sequence), 0);
        of_sequence.splits = decode::Splits(of_sequence.visible);
        of_sequence.new_row = append_rows::cache_row_of(launch.append, b);
        items = max(of_sequence.splits.count, 1) * row_tiles(launch) * p.heads_kv;
        block.shared.sequences[b] = of_sequence;
    }
#pragma unroll
    for (int step = 1; step < Config::kMostBatch; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, items, step);
        if (b >= step) items += other;
    }
    if (b < launch.batch) block.shared.sequences[b].end = items;
}

/// Copies the weights of the QK norm and the rows of the rotary tables into shared memory, by the warp that ran
/// find_sequences().
template <class Shape>
__device__ __forceinline__ void read_tables(const Block<Shape>& block) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    const append_rows::Launch& append = block.launch.append;
    __syncwarp();
    for (int b = 0; b < block.launch.batch && append.pairs > 0; ++b) {
        const std::int64_t row = append_rows::rotary_row(append, block.shared.sequences[b].new_row.position);
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
    while (block.shared.sequences[item.sequence].end <= index) ++item.sequence;
    if (item.sequence > 0) index -= block.shared.sequences[item.sequence - 1].end;
    const SequenceWork& of_sequence = block.shared.sequences[item.sequence];
    const int of_tiles = launch.attention.heads_kv.quotient(index), tiles = row_tiles(launch);
    item.kv_head = index - of_tiles * p.heads_kv;
    const int from_last = of_tiles / tiles, tile = of_tiles - from_last * tiles;
    const int splits = max(of_sequence.splits.count, 1);
    item.split = splits - 1 - from_last;
    item.first_row = tile * Config::kRowsOfTile;
    item.rows = min(p.group - item.first_row, Config::kRowsOfTile);
    item.newest = from_last == 0 && of_sequence.new_row.slot >= 0;
    item.writes = item.newest && tile == 0;
    if (of_sequence.splits.count > 0) {
        const int number = of_sequence.splits.first + item.split;
        item.keys = {max(number << of_sequence.splits.shift, of_sequence.visible.begin),
                     min((number + 1) << of_sequence.splits.shift, of_sequence.visible.end)};
        item.tile = item.keys.begin / decode::Config::kKeys * decode::Config::kKeys;
    }
    return item;
}

/// The items of a CTA are first_item(), and every gridDim.x-th after it. Items with new keys wait longest for their
/// data, so they come first. They go to the last CTAs, which have no more rows of weights than others.
__device__ __forceinline__ int first_item() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

template <class Shape>
__device__ __forceinline__ int items_of_all(const Block<Shape>& block) {
    return block.shared.sequences[block.launch.batch - 1].end;
}

}  // namespace tessera::cuda::block
