// SPDX-License-Identifier: Apache-2.0
//
// O on its way to global memory: through the shared memory of Q, where each warp owns the rows that it alone reads.
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::fa2 {

/// Inf and NaN of V were taken out of the tiles that not every query sees whole; the queries that do see them get them
/// back here. For eight columns of one row of O.
template <class T>
__device__ __noinline__ uint4 restore(uint4 chunk, const Source& v, const KeyTiles& tiles, int block_kv,
                                      const Visible& visible, int query, int column) {
    T values[kChunk];
    memcpy(values, &chunk, sizeof(chunk));
    for (int step = 0; step < tiles.partial; ++step) {
        const int begin = tiles.at(step) * block_kv;
        const int end = min(begin + block_kv, visible.last(query) + 1);
        for (int key = max(begin, visible.first(query)); key < end; ++key) {
            const uint4 row = v.elements(key, column);
            T others[kChunk];
            memcpy(others, &row, sizeof(row));
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const auto other = static_cast<float>(others[i]);
                if (!isfinite(other)) values[i] = static_cast<T>(static_cast<float>(values[i]) + other);
            }
        }
    }
    memcpy(&chunk, values, sizeof(chunk));
    return chunk;
}

}  // namespace tessera::cuda::fa2
