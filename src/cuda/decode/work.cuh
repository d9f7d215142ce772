// SPDX-License-Identifier: Apache-2.0
//
// The work of the decode kernels: sequences, whose lengths may be in device memory alone, and splits of the keys of a
// tile of rows. Row r of a kv head of a sequence is query r / group, of query head r % group of the group.
#pragma once

#include <climits>

#include "cuda/decode/launch.hpp"
#include "cuda/tile/cache.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::decode {

/// The queries begin ... end - 1 of a sequence in a launch.
__device__ __forceinline__ Span queries_of(const Launch& launch, const CachedSequence& cached) {
    const auto inside = [&](std::int64_t query) {
        return static_cast<int>(
            min(max(query - cached.first_query, std::int64_t{0}), std::int64_t{cached.sequence.len_q}));
    };
    return {inside(launch.first_query), inside(launch.end_query)};
}

/// Mask::bind in 32 bits.
__device__ __forceinline__ Band32 band_of(const Launch& launch, const Sequence& sequence) {
    const int diagonal = sequence.len_kv - sequence.len_q;
    const int high = launch.top_left ? min(diagonal + launch.right, 0) : diagonal + launch.right;
    return {max(diagonal - launch.left, -sequence.len_q), min(high, sequence.len_kv), sequence.len_kv - 1};
}

__device__ __forceinline__ Items items_of(const Launch& launch, const CachedSequence& cached, int rows_of_tile) {
    return {band_of(launch, cached.sequence), queries_of(launch, cached), cached.sequence.len_kv, launch.params.group,
            rows_of_tile};
}

/// One split of a tile of rows of a kv head.
struct SplitWork {
    CachedSequence cached;
    int batch;
    int kv_head;
    int first_row;  ///< of the kv head's rows of this sequence
    int rows;       ///< rows that exist; 0: there are no more splits
    bool exists;    ///< does the tile have such a split?
    bool alike;     ///< do all rows have splits of this length?
    int shift;      ///< log2 of the keys of a full split
    int number;     ///< its keys begin at number << shift
    int tile;       ///< first key of the first tile: a multiple of 64
    int begin;      ///< keys begin ... end - 1 are visible to a row
    int end;
    int full_begin;  ///< keys full_begin ... full_end - 1 are visible to all rows
    int full_end;
    Band32 band;

    __device__ __forceinline__ int tiles() const { return (end - tile + Config::kKeys - 1) / Config::kKeys; }
    /// The query of a row of the tile, and its query head.
    __device__ __forceinline__ int query(const Launch& launch, int row) const {
        return launch.group.quotient(first_row + row);
    }
    __device__ __forceinline__ int head(const Launch& launch, int row) const {
        return (kv_head - query(launch, row)) * launch.params.group + first_row + row;
    }

    __device__ __forceinline__ static SplitWork find(const Launch& launch, int batch, int item, int rows_of_tile) {
        const ForwardParams& p = launch.params;
        SplitWork w{.cached = cached_sequence_of(launch.params, launch.cache, batch), .batch = batch};
        const Sequence& sequence = w.cached.sequence;
        w.band = band_of(launch, sequence);
        const Span queries = queries_of(launch, w.cached);
        const Items items =
            launch.own_lengths() ? Items(w.band, queries, sequence.len_kv, p.group, rows_of_tile) : launch.items;
        // Neighbouring CTAs have the tiles of the same keys, and the kv heads of the same tokens.
        int tile = 0;
        if (items.tiles > 1) {
            tile = item % items.tiles;
            item /= items.tiles;
        }
        int split = launch.heads_kv.quotient(item);
        w.kv_head = item - split * p.heads_kv;
        w.first_row = queries.begin * p.group + tile * rows_of_tile;
        w.rows = min(queries.end * p.group - w.first_row, rows_of_tile);
        const int first_query = w.query(launch, 0), last_query = w.query(launch, w.rows - 1);
        const RowSplits of_rows(w.band, first_query, last_query);
        w.exists = split < of_rows.count();
        w.alike = of_rows.alike();
        const bool is_large = split >= of_rows.small.count;
        const Splits& splits = is_large ? of_rows.large : of_rows.small;
        if (is_large) split -= of_rows.small.count;
        w.shift = splits.shift;
        w.number = splits.first + split;
        w.begin = max(w.number << w.shift, of_rows.visible.begin);
        w.end = min((w.number + 1) << w.shift, of_rows.visible.end);
        w.tile = w.begin / Config::kKeys * Config::kKeys;
        w.full_begin = w.alike ? max(w.band.first(last_query), 0) : INT_MAX;
        w.full_end = w.band.last(first_query) + 1;
        return w;
    }
};

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
