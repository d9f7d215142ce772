// SPDX-License-Identifier: Apache-2.0
//
// NaN and infinities in tiles. P of a masked pair is 0, but 0 * NaN is NaN. So they are set to 0 before the MMAs of a
// tile with masked pairs.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/fa3/backward/launch.hpp"
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

/// Rows of dQ of a query head, and some of its columns.
struct DqPart {
    int batch;  ///< in the tensors: 0 when ragged
    int head;
    std::int64_t first_q, first_kv;  ///< rows of the tensors where the sequence begins
    int query, queries;
    int column, columns;  ///< multiples of 8
};

/// Stores NaN in each column of a row of dQ in which a key that the query sees is not finite. The dS of such a pair is
/// 0 or NaN, and 0 times infinity is NaN, but the MMAs of dQ have taken the key's element as 0. It is rare and slow.
/// `thread` < `threads`: those that have written this part, and have synchronized since.
template <class T>
__device__ __forceinline__ void store_nan_of_keys(const Launch& launch, const SequenceSchedule& schedule,
                                                  const DqPart& part, int thread, int threads) {
    const ForwardParams& p = launch.params.forward;
    const Rows& k = p.k;
    const Rows& dq = launch.params.dq;
    const T* keys = reinterpret_cast<const T*>(k.data) + part.batch * k.batch + part.head / p.group * k.head +
                    part.first_kv * k.row;
    T* out = reinterpret_cast<T*>(dq.data) + part.batch * dq.batch + part.head * dq.head + part.first_q * dq.row;
    const int chunks = part.columns / 8;
#pragma unroll 1
    for (int i = thread; i < part.queries * chunks; i += threads) {
        const int query = part.query + i / chunks;
        const int first = part.column + i % chunks * 8;
        const int end = min(first + 8, p.head_dim);
        const int last = min(query + schedule.high, schedule.last_key);
        if (query >= schedule.len_q) continue;
#pragma unroll 1
        for (int column = first; column < end; ++column) {
            bool found = false;
#pragma unroll 4
            for (int key = max(query + schedule.low, 0); key <= last; ++key) {
                found |= !isfinite(static_cast<float>(keys[key * k.row + column * k.column]));
            }
            if (found) out[query * dq.row + column * dq.column] = T(NAN);
        }
    }
}

}  // namespace tessera::cuda::fa3::backward
