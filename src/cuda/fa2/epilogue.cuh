// SPDX-License-Identifier: Apache-2.0
//
// O on its way to global memory: through the shared memory of Q, where each warp owns the rows that it alone reads.
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/score.cuh"

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

/// A warp's rows of O, normalised and rounded, into shared memory; o: [16 rows][8 dims][4], factor: [16 rows][2].
template <class T, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void stage(char* tile, const float (&o)[kRowTiles][kHeadDim / 8][4],
                                      const float (&factor)[kRowTiles][2], int first_row, int lane) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + 8 * r + lane / 4;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                const float low = o[m][n][2 * r] * factor[m][r];
                const float high = o[m][n][2 * r + 1] * factor[m][r];
                *reinterpret_cast<std::uint32_t*>(tile + chunk_offset<kHeadDim>(row, n) + lane % 4 * 4) =
                    ptx::pack<T>(low, high);
            }
        }
    }
}

/// Where O goes.
struct Target {
    char* data = nullptr;  // row 0 of the head
    std::int64_t row_bytes = 0;
    std::int64_t column_bytes = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;

    __device__ __forceinline__ void store(int row, int column, const uint4& chunk) const {
        char* to = data + row * row_bytes + column * column_bytes;
        if (vector) {
            *reinterpret_cast<uint4*>(to) = chunk;
            return;
        }
        const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (column + i >= dim) return;
            const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
            *reinterpret_cast<std::uint16_t*>(to + i * column_bytes) = bits;
        }
    }
};

/// A warp's rows from shared to global memory. `finish`(chunk, row of the tile, column) has the last word.
template <int kHeadDim, int kRows, class Finish>
__device__ __forceinline__ void store(const char* tile, const Target& target, int q_begin, int first_row, int lane,
                                      const Finish& finish) {
    constexpr int kChunks = kHeadDim / kChunk;
    const int column = lane % kChunks * kChunk;
#pragma unroll 4
    for (int row = first_row + lane / kChunks; row < first_row + kRows; row += 32 / kChunks) {
        if (q_begin + row >= target.rows || column >= target.dim) continue;
        const uint4 chunk = *reinterpret_cast<const uint4*>(tile + chunk_offset<kHeadDim>(row, column / kChunk));
        target.store(q_begin + row, column, finish(chunk, q_begin + row, column));
    }
}

}  // namespace tessera::cuda::fa2
