// SPDX-License-Identifier: Apache-2.0
//
// O on its way to global memory: through the shared memory of Q, where each warp owns the rows that it alone reads.
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda::fa2 {

/// Inf and NaN of V were taken out of the tiles that not every query sees whole; the queries that do see them get them
/// back here. For eight columns of one row of O; `v` is row 0 of the head.
template <class T>
__device__ __forceinline__ void restore(uint4& chunk, const char* v, const Layout& layout, const KeyTiles& tiles,
                                        int block_kv, const Visible& visible, int query, int column) {
    const int end = visible.last(query) + 1;
#pragma unroll 1
    for (int key = max(visible.first(query), 0); key < end; ++key) {
        if (tiles.full(key / block_kv)) continue;
        const uint4 row = elements(v + key * layout.row + column * layout.column, layout.column, layout.dim - column);
        chunk = {add_special<T>(chunk.x, row.x), add_special<T>(chunk.y, row.y), add_special<T>(chunk.z, row.z),
                 add_special<T>(chunk.w, row.w)};
    }
}

}  // namespace tessera::cuda::fa2
