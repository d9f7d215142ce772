// SPDX-License-Identifier: Apache-2.0
//
// Which pair an element of a thread's accumulators is, and which pairs are visible.
#pragma once

#include "cuda/fa3/host/dq_order.hpp"

namespace tessera::cuda::fa3::backward {

/// Element 4 * j + 2 * r + e of an accumulator is row r, column 8 * j + 2 * (lane % 4) + e.
constexpr int row_of(int element) { return element / 2 % 2; }
constexpr int column_of(int element) { return element / 4 * 8 + element % 2; }

/// Which of a warpgroup's pairs of a step are visible; rows are keys, columns queries.
struct PairMask {
    int first[2], last[2];  ///< columns that row r sees, counted from the thread's first

    /// `key`: the thread's first row; `query`: its first column.
    __device__ __forceinline__ PairMask(const Pairs& pairs, int key, int query) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int k = key + 8 * r;
            first[r] = k - pairs.high - query;
            last[r] = k < pairs.len_kv ? min(k - pairs.low, pairs.len_q - 1) - query : -1;
        }
    }
    __device__ __forceinline__ bool sees(int element) const {
        return column_of(element) >= first[row_of(element)] && column_of(element) <= last[row_of(element)];
    }
};

}  // namespace tessera::cuda::fa3::backward
