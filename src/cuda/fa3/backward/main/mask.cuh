// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::fa3::backward {

/// The visible pairs among a thread's pairs of a step. Rows are keys, columns queries.
struct PairMask {
    int first[2], last[2];  ///< columns that row r sees, counted from the thread's first one

    /// `key`: the thread's first row; `query`: its first column.
    __device__ __forceinline__ PairMask(const SequenceSchedule& sequence, int key, int query) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int k = key + 8 * r;
            first[r] = k - sequence.high - query;
            last[r] = k <= sequence.last_key ? min(k - sequence.low, sequence.len_q - 1) - query : -1;
        }
    }
    __device__ __forceinline__ bool sees(int element) const {
        return column_of(element) >= first[row_of(element)] && column_of(element) <= last[row_of(element)];
    }
};

}  // namespace tessera::cuda::fa3::backward
