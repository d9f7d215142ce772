// SPDX-License-Identifier: Apache-2.0
//
// NaN and infinities in tiles. P of a masked pair is 0, but 0 * NaN is NaN. So they are set to 0 before the MMAs of a
// tile with masked pairs.
#pragma once

#include <cstdint>

#include "cuda/tile/nonfinite.cuh"

namespace tessera::cuda::fa3::backward {

/// Does this thread's part of a tile hold NaN or infinities? `thread` < kThreads. kAtOnce: loads under way.
template <class T, int kBytes, int kThreads, int kAtOnce = 1>
__device__ __forceinline__ bool any_nonfinite(const void* tile, int thread) {
    const auto* chunks = static_cast<const uint4*>(tile) + thread;
    std::uint32_t found = 0;
#pragma unroll kAtOnce
    for (int i = 0; i < kBytes / 16; i += kThreads) found |= nonfinite<T>(chunks[i]);
    return found != 0;
}

template <class T>
__device__ __forceinline__ std::uint32_t without_nonfinite(std::uint32_t pair) {
    return pair & ~((nonfinite<T>(pair) >> 15) * 0xFFFF);
}

/// Sets NaN and infinities in this thread's part of a tile to 0. Returns whether there were any. No branch depends on
/// the thread, after which ptxas would keep nothing in uniform registers. kAtOnce: loads under way, four registers
/// each.
template <class T, int kBytes, int kThreads, int kAtOnce = 1>
__device__ __forceinline__ bool zero_nonfinite(void* tile, int thread) {
    static_assert(kBytes % (16 * kThreads) == 0);
    auto* chunks = static_cast<uint4*>(tile) + thread;
    std::uint32_t found = 0;
#pragma unroll kAtOnce
    for (int i = 0; i < kBytes / 16; i += kThreads) {
        const uint4 c = chunks[i];
        found |= nonfinite<T>(c);
        chunks[i] = make_uint4(without_nonfinite<T>(c.x), without_nonfinite<T>(c.y), without_nonfinite<T>(c.z),
                               without_nonfinite<T>(c.w));
    }
    return found != 0;
}

}  // namespace tessera::cuda::fa3::backward
