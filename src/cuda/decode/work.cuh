// SPDX-License-Identifier: Apache-2.0
//
// The work of the decode kernels: sequences, whose lengths may be in device memory alone, their tiles of rows, and the
// splits of a tile.
#pragma once

#include <climits>

#include "cuda/decode/launch.hpp"
#include "cuda/host/band32.hpp"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::decode {

/// A sequence, and the slot of its keys. Without pages, key j is row first_kv + j of the slot; with pages, of the
/// sequence's own pages.
struct Member {
    Sequence sequence;
    std::int64_t slot = 0;
    std::int64_t first_row = 0;  ///< its first query, counted over all sequences
};

__device__ __forceinline__ Member member_of(const Launch& launch, std::int64_t batch) {
    const ForwardParams& p = launch.params;
    const Cache& cache = launch.cache;
    if (cache.lengths == nullptr) {
        const Sequence sequence = sequence_of(p, batch);
        return {sequence, batch, p.cu_seqlens_q == nullptr ? batch * p.len_q : sequence.first_q};
    }
    Member m{{0, 0, p.len_q, 0}, batch, batch * p.len_q};
    if (p.cu_seqlens_q != nullptr) {
        const std::int64_t begin = cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_q, p.cu_q_is_64, p.total_q);
        const std::int64_t end = cu_seqlens_at(p.cu_seqlens_q, (batch + 1) * p.cu_stride_q, p.cu_q_is_64, p.total_q);
        m.sequence.first_q = m.first_row = begin;
        m.sequence.len_q = static_cast<int>(min(max(end - begin, std::int64_t{0}), std::int64_t{p.len_q}));
    }
    const int end = min(max(cache.lengths[batch * cache.lengths_step], 0), p.len_kv);
    const int padding = cache.padding == nullptr ? 0 : min(max(cache.padding[batch * cache.padding_step], 0), end);
    m.sequence.first_kv = padding;
    m.sequence.len_kv = end - padding;
    if (cache.slots != nullptr) m.slot = cache.slots[batch * cache.slots_step];
    const bool exists = cache.pages != nullptr || (m.slot >= 0 && m.slot < cache.count);
    if (!exists) m.sequence.len_kv = 0;
    return m;
}

/// Tiles of kRows rows of one kv head. Row r is query r / group of the sequence, and query head r % group of the group.
template <int kRows>
__device__ __forceinline__ int row_tiles_of(const Sequence& sequence, int group) {
    return (sequence.len_q * group + kRows - 1) / kRows;
}

/// The keys that query `query` sees.
__device__ __forceinline__ Range visible_of(const Band32& band, int query) {
    const int begin = max(band.first(query), 0), end = band.last(query) + 1;
    return band.low <= band.high && begin < end ? Range{begin, end} : Range{};
}

/// The queries of a tile of rows, and the splits of its rows. Rows that see more keys than their neighbours may have
/// splits twice as long: the splits of `small` come first, then those of `large`.
struct TileWork {
    int first_query, last_query;
    Range visible;  ///< keys that one of them sees
    Splits small, large;

    __device__ __forceinline__ TileWork(const Band32& band, int first, int last)
        : first_query(first), last_query(last), visible{}, small({}, 1), large({}, 1) {
        if (band.low > band.high) return;
        visible = {max(band.first(first), 0), band.last(last) + 1};
        if (visible.empty()) {
            visible = {};
            return;
        }
        const auto keys = [&](int query) { return visible_of(band, min(max(query, first), last)).size(); };
        const std::int64_t fewest = min(keys(first), keys(last));
        // The number of keys grows, stays and falls with the query: the most keys are at an end or where it turns.
        const std::int64_t most =
            max(max(keys(first), keys(last)), max(keys(-band.low), keys(band.last_key - band.high)));
        small = Splits(visible, split_keys(fewest));
        large = Splits(visible, split_keys(most));
    }
    __device__ __forceinline__ bool alike() const { return small.keys == large.keys; }
    __device__ __forceinline__ int splits() const { return small.count + (alike() ? 0 : large.count); }
};

__device__ __forceinline__ Band32 band_of(const Mask& mask, const Sequence& sequence) {
    return Band32(mask.bind(sequence.len_q, sequence.len_kv));
}

/// Numbers of splits to work on, for one kv head of a sequence: `tiles` row tiles of up to `splits` each.
struct Items {
    int tiles;
    int splits;
};

template <int kRows>
__device__ __forceinline__ Items items_of(const Launch& launch, const Sequence& sequence) {
    const int group = launch.params.group;
    const int tiles = row_tiles_of<kRows>(sequence, group);
    if (tiles == 0) return {0, 0};
    if (tiles > 1) return {tiles, most_splits_of_rows(sequence.len_kv)};
    return {1, TileWork(band_of(launch.params.mask, sequence), 0, sequence.len_q - 1).splits()};
}

/// How scores become those of the softmax.
__device__ __forceinline__ Scale scale_of(const Launch& launch) {
    return launch.natural ? Scale{} : Scale{launch.params.scale, launch.params.scale * kLog2E};
}

/// The factor of sums relative to maximum `before` when the maximum becomes `after`: that of OnlineSoftmax.
template <class T>
__device__ __forceinline__ float rescale_of(float before, float after, const Scale& scale) {
    OnlineSoftmax<T> row;
    row.max[0] = row.max[1] = before;
    Rescaling rescaling = row.update_max({after, after}, scale);
    float none[1][4] = {};
    if (rescaling.large(0)) row.subtract(none, scale, rescaling);
    return rescaling.rescale[0];
}

}  // namespace tessera::cuda::decode
