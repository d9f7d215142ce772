// SPDX-License-Identifier: Apache-2.0
//
// Tiles in shared memory, and the ways in and out. A tile is rows of kHeadDim 16-bit numbers in chunks of 16 bytes;
// chunk c of row r lies at c ^ (r % 8), so that the eight rows of an 8 x 8 matrix fall on all banks.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/params.hpp"

namespace tessera::cuda {

inline constexpr int kChunk = 8;  // elements in 16 bytes

/// Byte offset of a chunk in a tile.
template <int kHeadDim>
__device__ __forceinline__ unsigned chunk_offset(unsigned row, unsigned chunk) {
    return row * kHeadDim * 2 + ((chunk ^ (row % 8)) * 16);
}

/// How rows lie in global memory. Strides in bytes.
struct Layout {
    std::int64_t row = 0;
    std::int64_t column = 0;
    int dim = 0;          // elements of a row
    bool vector = false;  // 16 bytes at a time
};

/// Eight elements from `from` on, one by one; zeros for those from `count` on.
__device__ __forceinline__ uint4 elements(const char* from, std::int64_t column, int count) {
    // Opaque, or the compiler would keep all multiples of it in registers that a kernel's loop is short of.
    const std::int64_t step = ptx::opaque(column);
    std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (i >= count) break;
        const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(from + i * step);
        words[i / 2] |= bits << (i % 2 * 16);
    }
    return {words[0], words[1], words[2], words[3]};
}

/// A thread's part in bringing tiles of kRows rows to shared memory: one chunk of every kRowsAtOnce-th row.
template <int kRows, int kHeadDim, int kThreads>
struct Loader {
    static constexpr int kChunks = kHeadDim / kChunk;
    static constexpr int kRowsAtOnce = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0 && kRows % kRowsAtOnce == 0);

    __device__ static __forceinline__ int chunk(unsigned thread = threadIdx.x) {
        return static_cast<int>(thread % kChunks);
    }
    __device__ static __forceinline__ int row(unsigned thread = threadIdx.x) {
        return static_cast<int>(thread / kChunks);
    }

    /// Brings rows [first_row, first_row + kRows) of `rows` to `tile`; what does not exist becomes 0. The vector way is
    /// under way on return. `thread`: which of the kThreads that load together.
    __device__ static __forceinline__ void load(char* tile, const char* data, const Layout& layout, int first_row,
                                                int rows, unsigned thread = threadIdx.x) {
        const int count = layout.dim - chunk(thread) * kChunk;
        const char* from = data + (first_row + row(thread)) * layout.row + chunk(thread) * kChunk * layout.column;
        // Opaque, or the compiler would keep multiples of it in registers that a kernel's loop is short of.
        const std::int64_t step = ptx::opaque(kRowsAtOnce * layout.row);
        if (layout.vector && first_row + kRows <= rows) {
#pragma unroll
            for (int i = 0; i < kRows; i += kRowsAtOnce) {
                const std::uint32_t to =
                    ptx::shared_address(tile) + chunk_offset<kHeadDim>(row(thread) + i, chunk(thread));
                ptx::cp_async_16(to, from, count > 0);
                from += step;
            }
            return;
        }
#pragma unroll 1
        for (int i = row(thread); i < kRows; i += kRowsAtOnce) {
            char* to = tile + chunk_offset<kHeadDim>(i, chunk(thread));
            const int exist = first_row + i < rows ? count : 0;
            if (layout.vector) ptx::cp_async_16(ptx::shared_address(to), from, exist > 0);
            else *reinterpret_cast<uint4*>(to) = elements(from, layout.column, exist);
            from += step;
        }
    }

    /// The vector way for whole tiles that follow each other, in parts that can be put between other work.
    static constexpr int kParts = kRows / kRowsAtOnce;
    class Stream {
     public:
        __device__ __forceinline__ Stream(const char* data, const Layout& layout, int first_row)
            : from_(data + (first_row + row()) * layout.row + chunk() * 16), inside_(chunk() * kChunk < layout.dim) {}

        /// Starts the next part of the tile at `tile`, an address of shared memory; zeros unless it `exists`.
        __device__ __forceinline__ void start(std::uint32_t tile, int part, const Layout& layout, bool exists) {
            ptx::cp_async_16(tile + chunk_offset<kHeadDim>(row() + part * kRowsAtOnce, chunk()), from_,
                             inside_ && exists);
            from_ += kRowsAtOnce * layout.row;
        }

     private:
        const char* from_;
        bool inside_;
    };
};

/// Rows of one head of one member.
struct Source {
    const char* data = nullptr;  // row 0
    std::int64_t row_bytes = 0;
    std::int64_t column_bytes = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;  // 16 bytes at a time
};

/// Rows of one head: `offset` bytes from the tensor's first element (head_offset()), `len` rows of `dim` elements.
template <class T>
__device__ __forceinline__ Source source_of(const Rows& rows, std::int64_t offset, int len, int dim, bool vector) {
    constexpr std::int64_t kSize = sizeof(T);
    return {rows.data + offset, rows.row * kSize, rows.column * kSize, len, dim, vector};
}

/// Brings rows [first_row, first_row + kRows) into `tile`. `thread`: which of the kThreads that load together.
template <int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ void load(char* tile, const Source& source, int first_row, unsigned thread = threadIdx.x) {
    Loader<kRows, kHeadDim, kThreads>::load(tile, source.data,
                                            {source.row_bytes, source.column_bytes, source.dim, source.vector},
                                            first_row, source.rows, thread);
}

/// The exponent bits of both halves of a word, and what carries into the sign bit when all of a half's are set.
template <class T>
struct Exponent {
    static constexpr std::uint32_t kMask = std::is_same_v<T, __half> ? 0x7C007C00 : 0x7F807F80;
    static constexpr std::uint32_t kLowest = std::is_same_v<T, __half> ? 0x04000400 : 0x00800080;
};

/// Replaces Inf and NaN in a tile by 0, and tells whether this thread met any: weights of 0 must not meet them.
template <class T, int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ bool clean(char* tile) {
    constexpr std::uint32_t kSigns = 0x80008000;
    bool met = false;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) * 16; i < kRows * kHeadDim * 2; i += kThreads * 16) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(tile + i);
        std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        std::uint32_t any = 0;
#pragma unroll
        for (std::uint32_t& word : words) {
            const std::uint32_t special = ((word & Exponent<T>::kMask) + Exponent<T>::kLowest) & kSigns;
            any |= special;
            word &= ~((special >> 15) * 0xFFFF);
        }
        if (any == 0) continue;
        met = true;
        *reinterpret_cast<uint4*>(tile + i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return met;
}

}  // namespace tessera::cuda
