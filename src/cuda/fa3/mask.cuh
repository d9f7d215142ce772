// SPDX-License-Identifier: Apache-2.0
//
// Hidden pairs of a block of keys: their scores become -inf, and where all 16 rows of a warp see none of 16 keys,
// nothing is exponentiated for them.
#pragma once

#include <cmath>

#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/tile_scheduler.cuh"

namespace tessera::cuda::fa3 {

/// Element 4 * j + 2 * r + e of an accumulator is row r, column 8 * j + 2 * (lane % 4) + e.
constexpr int row_of(int element) { return element / 2 % 2; }
constexpr int column_of(int element) { return element / 4 * 8 + element % 2; }

/// Scores are worked on in chunks of 8 of a thread: 16 keys of its two rows, and of all 16 rows of its warp.
inline constexpr int kChunk = 8;
static_assert(2 * kChunkKeys == 4 * kChunk, "two rows, four lanes a row");

/// Scores of pairs that are not visible become -inf. `query`: of the thread's rows.
template <int kCount>
__device__ __forceinline__ void apply_mask(float (&scores)[kCount], const WorkTile& tile, const int (&query)[2],
                                           int first_key, int lane) {
    const int key = first_key + 2 * (lane % 4);  // relative to it, columns are compile-time numbers
    const int first[2] = {query[0] + tile.low - key, query[1] + tile.low - key};
    const int last[2] = {min(query[0] + tile.high, tile.last_key) - key,
                         min(query[1] + tile.high, tile.last_key) - key};
    if (__any_sync(kAllLanes, first[1] > 0)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (column_of(i) < first[row_of(i)]) scores[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (column_of(i) > last[row_of(i)]) scores[i] = -INFINITY;
    }
}

/// The same, chunk by chunk: those that all rows see are left alone, and those that none sees take no comparison.
template <int kCount>
__device__ __forceinline__ SeenChunks apply_mask_by_chunks(float (&scores)[kCount], const WorkTile& tile,
                                                           const int (&query)[2], int first_key, int lane) {
    const int key = first_key + 2 * (lane % 4);
    const int first[2] = {query[0] + tile.low - key, query[1] + tile.low - key};
    const int last[2] = {min(query[0] + tile.high, tile.last_key) - key,
                         min(query[1] + tile.high, tile.last_key) - key};
    // Lane 0 holds the warp's first row and the first column of a chunk, lane 31 the last row, six columns further.
    const KeysSeen of_warp{__shfl_sync(kAllLanes, first[0], 0), __shfl_sync(kAllLanes, last[0], 0) + 1,
                           __shfl_sync(kAllLanes, first[1] + 6, 31), __shfl_sync(kAllLanes, last[1] + 6, 31) + 1};
#pragma unroll
    for (int c = 0; c < kCount / kChunk; ++c) {
        if (of_warp.hidden(c)) {
#pragma unroll
            for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) scores[i] = -INFINITY;
        } else if (!of_warp.whole(c)) {
#pragma unroll
            for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
                const bool before = column_of(i) < first[row_of(i)];
                const bool behind = column_of(i) > last[row_of(i)];
                if (before | behind) scores[i] = -INFINITY;
            }
        }
    }
    return of_warp.seen();
}

}  // namespace tessera::cuda::fa3
