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

    /// Address of a row, or null past the last query.
    __device__ __forceinline__ char* address(int at_row) const {
        const int query = at_row >> shift;
        return query < rows ? data + query * row + (at_row - (query << shift)) * head : nullptr;
    }
    /// Stores eight columns from `first` on of the row at `to`, if there is one.
    __device__ __forceinline__ void store(char* to, int first, const uint2& chunk) const {
        if (to == nullptr || first >= dim) return;
        if (vector) {
            *reinterpret_cast<uint2*>(to + first) = chunk;
            return;
        }
        to += first * column;
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

/// Residuals of two neighbouring elements, in the upper bytes of the two halves of a word.
template <class T>
__device__ __forceinline__ std::uint32_t two_residuals(float low, float high) {
    const std::uint32_t rounded = ptx::pack<T>(low, high);
    if constexpr (kDTypeOf<T> == DType::bf16) {
        // residual_of() by halves of 16 bits. The lower half of x, with a sign, counts last places of fp32 where x was
        // rounded up; where it was not, it has no sign, and is cut so that the residual is at most 127.
        const auto x = __float_as_uint(low), y = __float_as_uint(high);
        const std::uint32_t upper = __byte_perm(x, y, 0x7632);
        const std::uint32_t lower = __byte_perm(x, y, 0x5410);
        const std::uint32_t most = (rounded - upper) * 0x8080 + 0x7F7F7F7F;  // 0xFFFF where x was rounded up
        return __viaddmax_s16x2(__vminu2(lower, most), 0x00800080, 0x80008000);
    } else {
        const auto a = static_cast<std::uint32_t>(residual_of<kDTypeOf<T>>(low, ptx::unpack<T>(rounded, 0)));
        const auto b = static_cast<std::uint32_t>(residual_of<kDTypeOf<T>>(high, ptx::unpack<T>(rounded, 1)));
        return __byte_perm(a, b, 0x4000);
    }
}
/// The residuals of four elements, a byte each.
template <class T>
__device__ __forceinline__ std::uint32_t four_residuals(float a, float b, float c, float d) {
    constexpr unsigned kUpperBytes = 0x7531;
    return __byte_perm(two_residuals<T>(a, b), two_residuals<T>(c, d), kUpperBytes);
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
        char* const to = target.address(row + 8 * r);
        if (!any_lane(to != nullptr)) continue;
        const auto two_chunks = [&](int tile) {
            return four_residuals<T>(value(tile, 2 * r), value(tile, 2 * r + 1), value(tile + 1, 2 * r),
                                     value(tile + 1, 2 * r + 1));
        };
#pragma unroll
        for (int first = 0; first < kTiles; first += 4) {
            const uint2 chunk = gather_chunk(two_chunks(first), two_chunks(first + 2), lane);
            target.store(to, 8 * (first + lane % 4), chunk);
        }
    }
}

}  // namespace tessera::cuda
