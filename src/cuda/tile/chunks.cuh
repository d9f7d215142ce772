// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the mma.sync kernels in shared memory, and how they are loaded. A row is kHeadDim 16-bit elements in chunks
// of 16 bytes. Chunk c of row r lies at c ^ (r % 8), so that the eight rows of an 8 x 8 matrix fall on all banks
// (swizzle).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/nonfinite.cuh"
#include "cuda/tile/params.hpp"

namespace tessera::cuda {

inline constexpr int kChunk = 8;  // elements in 16 bytes

/// Byte offset of a chunk in a tile.
template <int kHeadDim>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return row * kHeadDim * 2 + ((chunk ^ (row % 8)) * 16);
}

/// Rows of one head of one sequence in global memory.
struct Source {
    const char* data = nullptr;  // row 0
    std::int64_t row_bytes = 0;
    std::int64_t column_bytes = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;  // 16 bytes at a time

    /// Eight elements from `column` on, read one by one; zeros past the end.
    __device__ __forceinline__ uint4 elements(int row, int column) const {
        // Opaque, or the compiler would keep its multiples in registers that the main loop needs.
        const std::int64_t step = ptx::opaque(column_bytes);
        const char* from = data + row * row_bytes + column * column_bytes;
        const int count = row < rows ? dim - column : 0;
        std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (i >= count) break;
            const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(from + i * step);
            words[i / 2] |= bits << (i % 2 * 16);
        }
        return {words[0], words[1], words[2], words[3]};
    }
};

/// Rows of one head: `offset` bytes from the tensor's first element (head_offset()), `len` rows of `dim` elements.
template <class T>
__device__ __forceinline__ Source source_of(const Rows& rows, std::int64_t offset, int len, int dim, bool vector) {
    constexpr std::int64_t kSize = sizeof(T);
    return {rows.data + offset, rows.row * kSize, rows.column * kSize, len, dim, vector};
}

/// A thread's part in loading kRows rows into a tile: one chunk of every kRowsAtOnce-th row.
template <int kRows, int kHeadDim, int kThreads>
struct Loader {
    static constexpr int kChunks = kHeadDim / kChunk;
    static constexpr int kRowsAtOnce = kThreads / kChunks;
    static constexpr int kParts = kRows / kRowsAtOnce;
    static_assert(kThreads % kChunks == 0 && kRows % kRowsAtOnce == 0);

    /// Loads rows [first_row, first_row + kRows); what is outside of the source becomes 0. Vector loads are cp.async
    /// and may still run on return. `thread`: which of the kThreads.
    __device__ static __forceinline__ void load(char* tile, const Source& source, int first_row, int thread) {
        const int chunk = thread % kChunks;
        const int row = thread / kChunks;
        const char* from = source.data + (first_row + row) * source.row_bytes + chunk * 16;
        // Opaque, or the compiler would keep its multiples in registers that the main loop needs.
        const std::int64_t step = ptx::opaque(kRowsAtOnce * source.row_bytes);
        const bool inside = chunk * kChunk < source.dim;
        if (source.vector && first_row + kRows <= source.rows) {
            const std::uint32_t to = ptx::shared_address(tile);
#pragma unroll
            for (int i = 0; i < kRows; i += kRowsAtOnce) {
                ptx::cp_async_16(to + chunk_offset<kHeadDim>(row + i, chunk), from, inside);
                from += step;
            }
            return;
        }
#pragma unroll 1
        for (int i = row; i < kRows; i += kRowsAtOnce) {
            char* to = tile + chunk_offset<kHeadDim>(i, chunk);
            const bool valid = inside && first_row + i < source.rows;
            if (source.vector) ptx::cp_async_16(ptx::shared_address(to), valid ? from : source.data, valid);
            else *reinterpret_cast<uint4*>(to) = source.elements(first_row + i, chunk * kChunk);
            from += step;
        }
    }

    /// Vector loads of rows that all exist, in kParts parts that can be put between other work.
    class Parts {
     public:
        Parts() = default;
        /// Rows from `first_row` on; zeros are loaded unless they `exist`.
        __device__ __forceinline__ Parts(char* tile, const Source& source, int first_row, bool exist) {
            // Opaque; otherwise the compiler would keep the values below in registers that the main loop needs.
            const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
            const int row = thread / kChunks;
            const int chunk = thread % kChunks;
            to_ = ptx::shared_address(tile) + chunk_offset<kHeadDim>(row, chunk);
            from_ = source.data + (first_row + row) * source.row_bytes + chunk * 16;
            step_ = kRowsAtOnce * source.row_bytes;
            inside_ = exist && chunk * kChunk < source.dim;
        }

        /// Called with 0, 1, ... kParts - 1.
        __device__ __forceinline__ void start(int part) {
            // Rows 8 apart have the same swizzle, rows 4 apart differ in one bit of the chunk index.
            static_assert(kRowsAtOnce % 4 == 0);
            const std::uint32_t swapped = part * kRowsAtOnce % 8 == 4 ? 64 : 0;
            ptx::cp_async_16((to_ ^ swapped) + part * kRowsAtOnce * kHeadDim * 2, from_, inside_);
            from_ += step_;
        }

     private:
        std::uint32_t to_;
        const char* from_;
        std::int64_t step_;
        bool inside_;
    };
};

template <int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ void load(char* tile, const Source& source, int first_row, int thread = threadIdx.x) {
    Loader<kRows, kHeadDim, kThreads>::load(tile, source, first_row, thread);
}

/// Does this thread's part of a tile hold Inf or NaN?
template <class T, int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ bool holds_nonfinite(const char* tile) {
    std::uint32_t any = 0;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) * 16; i < kRows * kHeadDim * 2; i += kThreads * 16) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(tile + i);
        any |= nonfinite<T>(chunk);
    }
    return any != 0;
}

/// Replaces Inf and NaN in a tile by 0, and returns whether this thread met any: 0 * NaN would be NaN in P V.
template <class T, int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ bool clean(char* tile) {
    bool met = false;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) * 16; i < kRows * kHeadDim * 2; i += kThreads * 16) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(tile + i);
        std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        std::uint32_t any = 0;
#pragma unroll
        for (std::uint32_t& word : words) {
            const std::uint32_t found = nonfinite<T>(word);
            any |= found;
            word &= ~((found >> 15) * 0xFFFF);
        }
        if (any == 0) continue;
        met = true;
        *reinterpret_cast<uint4*>(tile + i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return met;
}

}  // namespace tessera::cuda
