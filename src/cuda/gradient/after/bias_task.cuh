// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tile/params.hpp"

namespace tessera::cuda::gradient {

/// Score tiles whose dS a thread sums before it adds them to its total. One fp32 number that a million tiles are added
/// to loses the digits of each.
inline constexpr int kTilesOfBiasPart = 512;

/// total += part, part = 0. Both [kRows][kColumns].
template <int kRows, int kColumns>
__device__ __forceinline__ void move_to_total(float (&total)[kRows][kColumns], float (&part)[kRows][kColumns]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            total[i][j] += part[i][j];
            part[i][j] = 0;
        }
    }
}

/// The elements of the gradient of the bias that a CTA owns, given as the sequences, heads, query tiles and key tiles
/// whose dS it sums.
struct BiasTask {
    /// Indices [begin, end) of one dimension.
    struct Part {
        int begin;
        int end;
    };
    Part batches;
    Part heads;
    Part q_tiles;
    Part key_tiles;

    BiasTask() = default;
    __device__ BiasTask(const ForwardParams& p, const BiasGradient& dbias, unsigned index, int q_count, int key_count) {
        key_tiles = take_part(index, dbias.column, key_count);
        q_tiles = take_part(index, dbias.row, q_count);
        heads = take_part(index, dbias.head, p.heads_q);
        batches = take_part(index, dbias.batch, static_cast<int>(p.batch));
    }

    /// Writes a tile of sums, [kRows][pitch] floats in shared memory, summed over dimensions in which the bias has one
    /// element. `thread`: of `threads` that store it together.
    template <class T, int kRows, int kColumns>
    __device__ void store(const ForwardParams& p, const BiasGradient& dbias, const float* sums, int pitch,
                          int thread = static_cast<int>(threadIdx.x),
                          int threads = static_cast<int>(blockDim.x)) const {
        const int rows = dbias.row == 0 ? 1 : kRows;
        const int columns = dbias.column == 0 ? 1 : kColumns;
        for (int i = thread; i < rows * columns; i += threads) {
            const int row = i / columns;
            const int column = i % columns;
            float sum = 0;
            for (int r = row; r < (dbias.row == 0 ? kRows : row + 1); ++r) {
                for (int c = column; c < (dbias.column == 0 ? kColumns : column + 1); ++c) sum += sums[r * pitch + c];
            }
            const int query = dbias.row == 0 ? 0 : q_tiles.begin * kRows + row;
            const int key = dbias.column == 0 ? 0 : key_tiles.begin * kColumns + column;
            if (dbias.row != 0 && query >= p.len_q) continue;
            if (dbias.column != 0 && key >= p.len_kv) continue;
            const std::int64_t at =
                batches.begin * dbias.batch + heads.begin * dbias.head + query * dbias.row + key * dbias.column;
            if (dbias.fp32) reinterpret_cast<float*>(dbias.data)[at] = sum;
            else reinterpret_cast<T*>(dbias.data)[at] = static_cast<T>(sum);
        }
    }

 private:
    /// The Part of one dimension. All of it if its stride is 0, since the bias then has one element in it; otherwise
    /// one index, taken off the CTA's `index`.
    __device__ static Part take_part(unsigned& index, std::int64_t stride, int count) {
        if (stride == 0) return {0, count};
        const auto at = static_cast<int>(index % static_cast<unsigned>(count));
        index /= static_cast<unsigned>(count);
        return {at, at + 1};
    }
};

/// CTAs of the gradient of the bias.
TESSERA_HOST_DEVICE inline std::int64_t bias_tasks(const ForwardParams& p, const BiasGradient& dbias, int q_count,
                                                   int key_count) {
    const auto count = [](std::int64_t stride, std::int64_t size) { return stride == 0 ? 1 : size; };
    return count(dbias.batch, p.batch) * count(dbias.head, p.heads_q) * count(dbias.row, q_count) *
           count(dbias.column, key_count);
}

}  // namespace tessera::cuda::gradient
