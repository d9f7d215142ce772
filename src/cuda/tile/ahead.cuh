// SPDX-License-Identifier: Apache-2.0
//
// A warp's GEMM whose operands come from shared memory. Fragments are read one step ahead of the MMAs that need them.
#pragma once

#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda {

/// Double-buffered fragments of a GEMM: those in use, and those that are being read.
template <int kRows>
struct Fragments {
    std::uint32_t a[2][kRows][4];
    std::uint32_t b[2][4];
};

/// Item kItem and all after it. Recursive, because the compiler does not always unroll a loop of that many items.
template <class T, int kSteps, int kRows, int kTiles, int kItem, class Sum, class ReadA, class ReadB, class Between>
__device__ __forceinline__ void multiply_from(Fragments<kRows>& read, const Sum& sum, const ReadA& read_a,
                                              const ReadB& read_b, const Between& between) {
    constexpr int kPairs = kTiles / 2;
    constexpr int kItems = kSteps * kPairs;
    constexpr int kStep = kItem / kPairs;
    constexpr int kPair = kItem % kPairs;
    if constexpr (kItem < kItems) {
        if constexpr (kItem + 1 < kItems) read_b((kItem + 1) / kPairs, (kItem + 1) % kPairs, read.b[(kItem + 1) % 2]);
        if constexpr (kPair == kPairs - 1 && kStep + 1 < kSteps) {
#pragma unroll
            for (int m = 0; m < kRows; ++m) read_a(kStep + 1, m, read.a[(kStep + 1) % 2][m]);
        }
        const std::uint32_t(&b)[4] = read.b[kItem % 2];
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            float(&of_rows)[kTiles][4] = sum(m);
            ptx::mma<T>(of_rows[2 * kPair], read.a[kStep % 2][m], b[0], b[1]);
            ptx::mma<T>(of_rows[2 * kPair + 1], read.a[kStep % 2][m], b[2], b[3]);
        }
        between(kItem);
        multiply_from<T, kSteps, kRows, kTiles, kItem + 1>(read, sum, read_a, read_b, between);
    }
}

/// sum(m) += A B over kSteps steps of 16, for kRows tiles of 16 rows; sum(m): float[kTiles][4], of 8 columns each.
/// `read_a`(step, m, a): A fragments of 16 rows; `read_b`(step, n, b): B fragments of 16 columns. `between`(i) is
/// called after item i of kSteps * kTiles / 2; an item is kRows * 2 MMAs.
template <class T, int kSteps, int kRows, int kTiles, class Sum, class ReadA, class ReadB, class Between>
__device__ __forceinline__ void multiply(const Sum& sum, const ReadA& read_a, const ReadB& read_b,
                                         const Between& between) {
    Fragments<kRows> read;
#pragma unroll
    for (int m = 0; m < kRows; ++m) read_a(0, m, read.a[0][m]);
    read_b(0, 0, read.b[0]);
    multiply_from<T, kSteps, kRows, kTiles, 0>(read, sum, read_a, read_b, between);
}

}  // namespace tessera::cuda
