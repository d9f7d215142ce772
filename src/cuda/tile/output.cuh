// SPDX-License-Identifier: Apache-2.0
//
// Epilogue of the mma.sync kernels: O goes to global memory through shared memory that belongs to the warp of its rows.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda {

/// Writes a warp's rows of O, normalised and rounded, to shared memory; o: [16 rows][8 dims][4], factor: [16 rows][2].
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
                // fmaf(x, f, 0) turns -0 into +0: the sign must not reveal how many masked products were added.
                const float low = fmaf(o[m][n][2 * r], factor[m][r], 0.0F);
                const float high = fmaf(o[m][n][2 * r + 1], factor[m][r], 0.0F);
                *reinterpret_cast<std::uint32_t*>(tile + chunk_offset<kHeadDim>(row, n) + lane % 4 * 4) =
                    ptx::pack<T>(low, high);
            }
        }
    }
}

/// One head of O in global memory.
struct Target {
    char* data = nullptr;  // row 0 of the head
    std::int64_t row_bytes = 0;
    std::int64_t column_bytes = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;

    __device__ __forceinline__ char* at(int row, int column) const {
        return data + row * row_bytes + column * column_bytes;
    }
    /// Stores a chunk element by element.
    __device__ __forceinline__ void store(int row, int column, const uint4& chunk) const {
        char* to = at(row, column);
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

/// Copies a warp's rows from shared to global memory.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void store(const char* tile, const Target& target, int q_begin, int first_row, int lane) {
    constexpr int kChunks = kHeadDim / kChunk;
    constexpr int kRowsAtOnce = 32 / kChunks;
    const int column = lane % kChunks * kChunk;
    const int row = first_row + lane / kChunks;
    if (column >= target.dim) return;
    const auto chunk = [&](int i) {
        return *reinterpret_cast<const uint4*>(tile + chunk_offset<kHeadDim>(row + i, column / kChunk));
    };
    if (target.vector) {
        char* to = target.at(q_begin + row, column);
#pragma unroll 4
        for (int i = 0; i < kRows; i += kRowsAtOnce) {
            if (q_begin + row + i < target.rows) *reinterpret_cast<uint4*>(to) = chunk(i);
            to += kRowsAtOnce * target.row_bytes;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
        if (q_begin + row + i < target.rows) target.store(q_begin + row + i, column, chunk(i));
    }
}

/// a + factor * b in both halves of a word where b is Inf or NaN; a elsewhere.
template <class T>
__device__ __forceinline__ std::uint32_t add_nonfinite(std::uint32_t a, std::uint32_t b, float factor = 1) {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float old = ptx::unpack<T>(a, half);
        const float other = ptx::unpack<T>(b, half);
        sum[half] = isfinite(other) ? old : fmaf(factor, other, old);
    }
    return ptx::pack<T>(sum[0], sum[1]);
}
template <class T>
__device__ __forceinline__ void add_nonfinite(uint4& chunk, const uint4& other, float factor) {
    chunk = {add_nonfinite<T>(chunk.x, other.x, factor), add_nonfinite<T>(chunk.y, other.y, factor),
             add_nonfinite<T>(chunk.z, other.z, factor), add_nonfinite<T>(chunk.w, other.w, factor)};
}

/// Adds the infinities and NaN of V, times `factor`, to a warp's rows of O in shared memory that see them. They were
/// replaced by 0 in tiles with hidden pairs (chunks.cuh).
template <class T, int kHeadDim, int kRows>
__device__ __forceinline__ void restore(char* tile, const Source& v, const Band32& band, int q_begin, int first_row,
                                        int lane, float factor = 1) {
    constexpr int kChunks = kHeadDim / kChunk;
    const int column = lane % kChunks * kChunk;
#pragma unroll 1
    for (int row = first_row + lane / kChunks; row < first_row + kRows; row += 32 / kChunks) {
        auto* stored = reinterpret_cast<uint4*>(tile + chunk_offset<kHeadDim>(row, column / kChunk));
        uint4 chunk = *stored;
        const int end = band.last(q_begin + row) + 1;
#pragma unroll 1
        for (int key = max(band.first(q_begin + row), 0); key < end; ++key) {
            add_nonfinite<T>(chunk, v.elements(key, column), factor);
        }
        *stored = chunk;
    }
}

}  // namespace tessera::cuda
