// SPDX-License-Identifier: Apache-2.0
//
// The warps of a split step (split_loop.cuh): which scores and sums each has, and its products.
#pragma once

#include "cuda/gradient/split_plan.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitProducts : SplitPlan<T, kConfig> {
    using Base = SplitPlan<T, kConfig>;
    using Base::clear;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kStepQueries;
    using Base::lane;
    using Base::warp;
    using Base::work;
    static constexpr int kQueries = 32;                         // of a warp's scores at once, ...
    static constexpr int kTurns = kStepQueries / 2 / kQueries;  // ... that many times a step
    static constexpr int kTiles = kQueries / 8;
    static constexpr int kColumns = kHeadDim / 2 / 8;  // of a warp's sums: 8 dims
    using Scores = float[kKeyTiles][kTiles][4];        // [16 keys][8 queries][4]
    using Sums = float[kKeyTiles][kColumns][4];        // [16 keys][8 dims][4]
    using Address = MatrixAddress<kHeadDim>;
    static constexpr int kProductItems = kHeadDim / 16 * (kTiles / 2);
    static constexpr int kSumItems = kStepQueries / 16 * (kColumns / 2);

    /// The warp's place among those that have the same keys: its half of a step's queries, and of the columns of sums.
    __device__ static __forceinline__ int half() { return warp() / 4; }
    __device__ static __forceinline__ int first_row() { return warp() % 4 * (16 * kKeyTiles); }
    /// The tile of the step's that has the warp's queries, and the first of those of a turn in it.
    __device__ static __forceinline__ int score_tile() { return half() * (kQueries * kTurns) / kBlockQ; }
    __device__ static __forceinline__ int first_column(int turn) {
        return half() * (kQueries * kTurns) % kBlockQ + turn * kQueries;
    }
    __device__ __forceinline__ const RowTile& rows(int stage) const { return inputs.rows(stage, score_tile()); }
    __device__ __forceinline__ char* weights() const { return inputs.weights(); }

    /// `of_tile`(m, j) for the tiles of scores that come after item `item` of kItems.
    template <int kItems, class OfTile>
    __device__ static __forceinline__ void for_share(int item, const OfTile& of_tile) {
        constexpr int kAll = kKeyTiles * kTiles;
#pragma unroll
        for (int t = item * kAll / kItems; t < (item + 1) * kAll / kItems; ++t) of_tile(t % kKeyTiles, t / kKeyTiles);
    }

    /// Numbers of a row of the tile that the thread has, for 8 queries: those of its two.
    __device__ static __forceinline__ float2 two(const float* from, int j) {
        return *reinterpret_cast<const float2*>(from + 8 * j);
    }

    /// The thread's scores of pairs that are not visible become -inf, in a turn of a step whose queries and keys are
    /// all there.
    __device__ __forceinline__ void hide_scores(Scores& s, int tile, int turn) const {
        const int key = work.first_key + first_row() + lane() / 4;
        const int query = tile * kStepQueries + score_tile() * kBlockQ + first_column(turn) + lane() % 4 * 2;
        const int first = key - query - work.visible.low;  // of the thread's first pair: how far in the band it is
        const int width = work.visible.high - work.visible.low;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int place = first + 16 * m + e / 2 * 8 - 8 * j - e % 2;
                    if (static_cast<unsigned>(place) > static_cast<unsigned>(width)) s[m][j][e] = -INFINITY;
                }
            }
        }
    }

    /// Where the thread's first scores lie in a [keys][queries] tile.
    __device__ static __forceinline__ int score_place(int turn) {
        return chunk_offset<kBlockQ>(first_row() + lane() / 4, first_column(turn) / kChunk) + lane() % 4 * 4;
    }
    __device__ static __forceinline__ void store(char* tile, int at, const std::uint32_t (&x)[2], int m, int j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            *reinterpret_cast<std::uint32_t*>(tile + (at ^ 16 * j) + (16 * m + 8 * r) * kBlockQ * 2) = x[r];
        }
    }
    __device__ static __forceinline__ void store(char* tile, int at, const float (&x)[4], int m, int j) {
        const std::uint32_t rounded[2] = {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3])};
        store(tile, at, rounded, m, j);
    }

    /// s = the warp's rows of `keys` times those of `queries` that are of the turn: K Q^T, V dO^T.
    template <class Between>
    __device__ __forceinline__ void multiply_keys(Scores& s, const char* keys, const char* queries, int turn,
                                                  const Between& between) const {
        const int first_query = half() * (kQueries * kTurns) + turn * kQueries;
        const Address a = Address::rows_first(keys, first_row(), lane());
        const Address b = Address::chunks_first(queries + first_query * kHeadDim * 2, lane());
        clear(s);
        multiply<T, kHeadDim / 16, kKeyTiles, kTiles>(
            [&](int m) -> float(&)[kTiles][4] { return s[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, b.at(16 * n, 2 * step)); }, between);
    }

    /// sums += the warp's rows of `factors`, tiles of [keys][queries], times its columns of `queries`: P^T dO, dS^T Q.
    template <class Between>
    __device__ __forceinline__ void add_rows(Sums& sums, const char* factors, const char* queries,
                                             const Between& between) const {
        const auto a = MatrixAddress<kBlockQ>::rows_first(factors, first_row(), lane());
        const Address b(queries, lane() % 16, half() * kColumns + lane() / 16);
        multiply<T, kStepQueries / 16, kKeyTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return sums[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
                constexpr int kSteps = kBlockQ / 16;  // of a tile
                ptx::ldmatrix_x4(to, a.at(16 * m, 2 * (step % kSteps)) + step / kSteps * kConfig.score_bytes());
            },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }
};

}  // namespace tessera::cuda::gradient
