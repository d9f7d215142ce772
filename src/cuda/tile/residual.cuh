// SPDX-License-Identifier: Apache-2.0
//
// o_residual, the low-order bits of O (core/o_residual.hpp), which a forward's epilogue stores. A backward reads it in
// backward/output_rows.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/o_residual.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda {

template <class T>
inline constexpr DType kDTypeOf = std::is_same_v<T, __half> ? DType::fp16 : DType::bf16;

/// The residual of one head in global memory, one byte an element. With PackGQA row r is query r >> shift of a head of
/// the group.
struct ResidualTarget {
    char* data = nullptr;  // query 0
    std::int64_t row = 0;
    std::int64_t column = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;  // 8 bytes at a time
    int shift = 0;        // log2 of the packed heads
    std::int64_t head = 0;

    __device__ __forceinline__ void store(int at_row, int first, const uint2& chunk) const {
        const int query = at_row >> shift;
        if (query >= rows || first >= dim) return;
        char* to = data + query * row + (at_row - (query << shift)) * head + first * column;
        if (vector) {
            *reinterpret_cast<uint2*>(to) = chunk;
            return;
        }
        std::uint64_t bytes = chunk.x | static_cast<std::uint64_t>(chunk.y) << 32;
#pragma unroll 1
        for (int i = first; i < min(first + 8, dim); ++i) {
            *to = static_cast<char>(bytes);
            bytes >>= 8;
            to += column;
        }
    }
};

__device__ __forceinline__ ResidualTarget residual_target(const Rows& residual, std::int64_t batch,
                                                          std::int64_t first_row, int head, int len, int dim,
                                                          bool vector) {
    return {residual.data + head_offset(residual, batch, first_row, head, 1),
            residual.row,
            residual.column,
            len,
            dim,
            vector};
}

/// Residuals of two neighbouring elements, in the lower 16 bits.
template <class T>
__device__ __forceinline__ std::uint32_t two_residuals(float low, float high) {
    const std::uint32_t rounded = ptx::pack<T>(low, high);
    const auto a = static_cast<std::uint32_t>(residual_of<kDTypeOf<T>>(low, ptx::unpack<T>(rounded, 0)));
    const auto b = static_cast<std::uint32_t>(residual_of<kDTypeOf<T>>(high, ptx::unpack<T>(rounded, 1)));
    return (a & 0xFF) | (b & 0xFF) << 8;
}

/// Transposes bytes over a quad: each lane has two bytes of a row in each of four chunks of eight bytes, and lane t
/// gets all of chunk t. `chunks01`: the lane's bytes of chunks 0 and 1.
__device__ __forceinline__ uint2 gather_chunk(std::uint32_t chunks01, std::uint32_t chunks23, int lane) {
    constexpr unsigned kLower = 0x5410;  // the lower halves of two words, and the upper ones
    constexpr unsigned kUpper = 0x7632;
    const bool second = (lane & 2) != 0;
    const bool odd = (lane & 1) != 0;
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, second ? chunks01 : chunks23, 2);
    const std::uint32_t a = second ? other : chunks01;  // bytes from lane 0 or 1 of the quad
    const std::uint32_t b = second ? chunks23 : other;  // bytes from lane 2 or 3
    const std::uint32_t lower = __byte_perm(a, b, kLower);
    const std::uint32_t upper = __byte_perm(a, b, kUpper);
    const std::uint32_t kept = odd ? upper : lower;
    const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? lower : upper, 1);
    const std::uint32_t from_even = odd ? got : kept;
    const std::uint32_t from_odd = odd ? kept : got;
    return {__byte_perm(from_even, from_odd, kLower), __byte_perm(from_even, from_odd, kUpper)};
}

/// Stores the residuals of a warp's 16 rows; `row` and row + 8 are this thread's. value(tile, e): element e of the
/// thread's accumulator of 8 columns, before it is rounded to O; row e / 2, column 8 * tile + 2 * (lane % 4) + e % 2.
template <class T, int kTiles, class Value>
__device__ __forceinline__ void store_residual(const ResidualTarget& target, int row, int lane, const Value& value) {
    static_assert(kTiles % 4 == 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int first = 0; first < kTiles; first += 4) {
            std::uint32_t chunks[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                chunks[i] = two_residuals<T>(value(first + i, 2 * r), value(first + i, 2 * r + 1));
            const uint2 chunk = gather_chunk(chunks[0] | chunks[1] << 16, chunks[2] | chunks[3] << 16, lane);
            target.store(row + 8 * r, 8 * (first + lane % 4), chunk);
        }
    }
}

}  // namespace tessera::cuda
