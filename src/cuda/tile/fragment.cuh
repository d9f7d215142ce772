// SPDX-License-Identifier: Apache-2.0
//
// The accumulator fragment of mma.m16n8 and wgmma, and what the lanes of a warp do together: which row and column an
// element is, reductions over the quad that shares a row, values known to be the same in all lanes.
#pragma once

#include <cstdint>

namespace tessera::cuda {

/// The mask of warp-wide instructions in which all 32 lanes take part.
inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

/// Row of an accumulator element, counted in steps of 8 rows from the thread's first. Element 4 * j + 2 * r + e is row
/// lane / 4 + 8 * r and column 8 * j + 2 * (lane % 4) + e of the warp's 16 rows.
constexpr int row_of(int element) { return element / 2 % 2; }
/// Column of an accumulator element, counted from the thread's first, which is 2 * (lane % 4).
constexpr int column_of(int element) { return element / 4 * 8 + element % 2; }

/// Maximum over the quad: the four lanes that hold one row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

/// Sum over the quad, with the same bits in its four lanes.
template <class Number>
__device__ __forceinline__ Number quad_sum(Number x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// Maximum over the 32 lanes of a warp.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}

/// Sum over the 32 lanes of a warp, with the same bits in all of them.
template <class Number>
__device__ __forceinline__ Number warp_sum(Number x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

/// Does `condition` hold in one of the warp's lanes?
__device__ __forceinline__ bool any_lane(int condition) { return __any_sync(kAllLanes, condition); }

/// A value that is the same in all lanes, and that the compiler then knows to be: it lives in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

/// A matrix descriptor that is the same in all lanes. Its lower half, the address, is then kept in a uniform register,
/// and no instruction is needed between two MMAs.
__device__ __forceinline__ std::uint64_t uniform(std::uint64_t descriptor) {
    const std::uint32_t low = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(descriptor), 0);
    return descriptor >> 32 << 32 | low;
}

}  // namespace tessera::cuda
