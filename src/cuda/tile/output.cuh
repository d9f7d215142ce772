// SPDX-License-Identifier: Apache-2.0
//
// O on its way to global memory, by way of shared memory that the rows' warp has for itself.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda {

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

/// Rows of one head: `offset` bytes from the tensor's first element (head_offset()).
template <class T>
__device__ __forceinline__ Target target_of(const Rows& rows, std::int64_t offset, int len, int dim, bool vector) {
    constexpr std::int64_t kSize = sizeof(T);
    return {rows.data + offset, rows.row * kSize, rows.column * kSize, len, dim, vector};
}

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

/// Inf and NaN of V were taken out of tiles that not every query sees whole (clean()); the queries that do see them get
/// them back here. For eight columns of one row of O, which sees keys [begin, end). By value: what a function takes by
/// reference lives in memory for all of the kernel that calls it.
template <class T>
__device__ __noinline__ uint4 restore(uint4 chunk, Source v, int begin, int end, int column) {
    T values[kChunk];
    memcpy(values, &chunk, sizeof(chunk));
    for (int key = begin; key < end; ++key) {
        const uint4 row = v.elements(key, column);
        T others[kChunk];
        memcpy(others, &row, sizeof(row));
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const auto other = static_cast<float>(others[i]);
            if (!isfinite(other)) values[i] = static_cast<T>(static_cast<float>(values[i]) + other);
        }
    }
    memcpy(&chunk, values, sizeof(chunk));
    return chunk;
}

}  // namespace tessera::cuda
