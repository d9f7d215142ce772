// SPDX-License-Identifier: Apache-2.0
//
// Rows of O, o_residual (core/o_residual.hpp) and dO as the delta kernels of a backward read them: dO . (O + residual),
// and in fp16 dO . dO and V . V, which bound |dS|.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/o_residual.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/nonfinite.cuh"
#include "cuda/tile/residual.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda {

/// Rows of one head of a tensor, as bytes.
struct HeadRows {
    const char* data = nullptr;  // row 0
    std::int64_t row = 0;
    std::int64_t column = 0;

    __device__ HeadRows(const Rows& rows, std::int64_t batch, std::int64_t first_row, int head, int size)
        : data(rows.data + head_offset(rows, batch, first_row, head, size)),
          row(rows.row * size),
          column(rows.column * size) {}

    /// Eight elements in a Word: one load if they are contiguous (`vector`), else element by element, with zeros past
    /// the end.
    template <class Word>
    __device__ __forceinline__ Word chunk(int at_row, int first, int dim, bool vector) const {
        constexpr int kSize = sizeof(Word) / 8;
        const char* from = data + at_row * row + first * column;
        if (vector) return *reinterpret_cast<const Word*>(from);
        std::uint64_t words[2] = {0, 0};
#pragma unroll 1
        for (int i = 0; i < min(8, dim - first); ++i) {
            const std::uint64_t element = kSize == 1 ? *reinterpret_cast<const std::uint8_t*>(from)
                                                     : *reinterpret_cast<const std::uint16_t*>(from);
            const int bit = 8 * kSize * i;
            if (bit < 64) words[0] |= element << bit;
            else words[1] |= element << (bit - 64);
            from += column;
        }
        Word result;
        memcpy(&result, words, sizeof(Word));
        return result;
    }
};

/// Eight threads share a row: thread `part` has chunks of eight columns, from 8 * part on, every 64 columns.
inline constexpr int kRowThreads = 8;

/// Sum over the eight threads of a row, with the same bits in each.
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int distance = 1; distance < kRowThreads; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}

/// Eight columns of a row of O, its residual and dO.
struct OutputChunk {
    uint4 o{}, d_o{};
    uint2 residual{};

    /// Adds dO . (O + residual), which is not finite if O or dO is not.
    template <class T>
    __device__ __forceinline__ void add_to(float& sum) const {
        const std::uint32_t o_words[4] = {o.x, o.y, o.z, o.w};
        const std::uint32_t gradients[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
        // The residual of a non-finite O means nothing.
        const auto zero = zero_or_nan<T>(o);
        const bool finite = (reinterpret_cast<const std::uint32_t&>(zero) & 0x7FFF7FFF) == 0;
        const uint2 known = finite ? residual : uint2{0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float g = ptx::unpack<T>(gradients[i / 2], i % 2);
            sum = fmaf(g, exact<T>(ptx::unpack<T>(o_words[i / 2], i % 2), i < 4 ? known.x : known.y, i % 4), sum);
        }
    }
    /// An element of O plus its residual, byte `index` of a word.
    template <class T>
    __device__ __forceinline__ static float exact(float rounded, std::uint32_t bytes, int index) {
        if constexpr (std::is_same_v<T, __half>) {
            return with_residual<kDTypeOf<T>>(rounded, static_cast<std::int8_t>(bytes >> (8 * index)));
        } else {
            // with_residual() in two instructions: the byte times 2^8, sign-extended.
            const std::uint32_t shifted = index == 0   ? ptx::permute_bytes<0x8804>(bytes, 0)
                                          : index == 1 ? ptx::permute_bytes<0x9914>(bytes, 0)
                                          : index == 2 ? ptx::permute_bytes<0xAA24>(bytes, 0)
                                                       : ptx::permute_bytes<0xBB34>(bytes, 0);
            return __int_as_float(__float_as_int(rounded) + static_cast<int>(shifted));
        }
    }
    /// dO . dO
    template <class T>
    __device__ __forceinline__ void add_squares_to(float& sum) const {
        const std::uint32_t gradients[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float g = ptx::unpack<T>(gradients[i / 2], i % 2);
            sum = fmaf(g, g, sum);
        }
    }
};

/// O, its residual and dO of one head.
template <class T>
struct OutputAndGradient {
    HeadRows o, residual, d_o;
    int dim;
    bool vector;

    /// Columns first ... first + 7 of a row, which are contiguous.
    __device__ __forceinline__ OutputChunk load(int row, int first) const {
        return {o.template chunk<uint4>(row, first, dim, true), d_o.template chunk<uint4>(row, first, dim, true),
                residual.template chunk<uint2>(row, first, dim, true)};
    }

    /// This thread's part of dO . (O + residual).
    __device__ __forceinline__ float dot(int row, int part) const {
        float sum = 0;
        for (int first = 8 * part; first < dim; first += 8 * kRowThreads) {
            const OutputChunk chunk{o.template chunk<uint4>(row, first, dim, vector),
                                    d_o.template chunk<uint4>(row, first, dim, vector),
                                    residual.template chunk<uint2>(row, first, dim, vector)};
            chunk.add_to<T>(sum);
        }
        return sum;
    }
};

/// This thread's part of 0 * row: 0 where the row is finite, else NaN. Its chunks are contiguous.
template <class T>
__device__ __forceinline__ float zero_of_row(const HeadRows& rows, int row, int dim, int part) {
    float zero = 0;
    for (int first = 8 * part; first < dim; first += 8 * kRowThreads) {
        const uint4 chunk = rows.chunk<uint4>(row, first, dim, true);
        const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) zero = fmaf(ptx::unpack<T>(words[i / 2], i % 2), 0.0F, zero);
    }
    return zero;
}

/// This thread's part of the sum of squares of a row. `vector`: the row can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ float squares_of_row(const HeadRows& rows, int row, int dim, int part, bool vector) {
    float sum = 0;
    for (int first = 8 * part; first < dim; first += 8 * kRowThreads) {
        const uint4 chunk = rows.chunk<uint4>(row, first, dim, vector);
        const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = ptx::unpack<T>(words[i / 2], i % 2);
            sum = fmaf(x, x, sum);
        }
    }
    return sum;
}

}  // namespace tessera::cuda
