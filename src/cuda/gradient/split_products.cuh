// SPDX-License-Identifier: Apache-2.0
//
// The warps of a split step (split_loop.cuh): which scores and sums each has, and its products.
#pragma once

#include "cuda/gradient/split_turns.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitProducts : SplitTurns<T, kConfig> {
    using Base = SplitTurns<T, kConfig>;
    using Base::clear;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kStepQueries;
    using Base::lane;
    using Base::warp;
    using Base::work;
    using typename Base::Planned;
    static constexpr int kQueries = kConfig.score_queries;                          // of a warp's scores at once, ...
    static constexpr int kTurns = kStepQueries / kConfig.query_parts() / kQueries;  // ... that many times a step
    static constexpr int kTiles = kQueries / 8;
    static constexpr int kKeyTiles = kConfig.key_tiles_of_scores();
    static constexpr int kSumTiles = kConfig.key_tiles_of_sums();
    static constexpr int kColumns = kHeadDim / kConfig.column_parts() / 8;  // of a warp's sums: 8 dims
    using Scores = float[kKeyTiles][kTiles][4];                             // [16 keys][8 queries][4]
    using Sums = float[kSumTiles][kColumns][4];                             // [16 keys][8 dims][4]
    using Address = MatrixAddress<kHeadDim>;
    static constexpr int kProductItems = kHeadDim / 16 * (kTiles / 2);
    static constexpr int kOwnItems = kQueries / 16 * (kColumns / 2);

    /// The warp's keys, and its place among those that have the same: its part of a step's queries.
    __device__ static __forceinline__ int first_row() {
        return warp() % kConfig.warps_of_keys(kKeyTiles) * (16 * kKeyTiles);
    }
    __device__ static __forceinline__ int query_part() { return warp() / kConfig.warps_of_keys(kKeyTiles); }
    /// Likewise of its sums: its part of the columns.
    __device__ static __forceinline__ int first_sum_row() {
        return warp() % kConfig.warps_of_keys(kSumTiles) * (16 * kSumTiles);
    }
    __device__ static __forceinline__ int first_sum_chunk() {
        return kConfig.own_sums ? 0 : warp() / kConfig.warps_of_keys(kSumTiles) * kColumns;
    }
    /// The tile of the step's that has the warp's queries, and the first of those of a turn in it.
    __device__ static __forceinline__ int score_tile() { return query_part() * (kQueries * kTurns) / kBlockQ; }
    __device__ static __forceinline__ int first_column(int turn) {
        return query_part() * (kQueries * kTurns) % kBlockQ + turn * kQueries;
    }
    __device__ __forceinline__ const RowTile& rows(int stage) const { return inputs.rows(stage, score_tile()); }
    __device__ __forceinline__ char* weights() const { return inputs.weights(); }

    /// `of_tile`(m, j) for the tiles of scores that come after item `item` of kItems.
    template <int kItems, class OfTile>
    __device__ static __forceinline__ void for_share(int item, const OfTile& of_tile) {
        constexpr int kAll = kKeyTiles * kTiles;
        if (item < 0) return;
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
        const int first_query = query_part() * (kQueries * kTurns) + turn * kQueries;
        const Address a = Address::rows_first(keys, first_row(), lane());
        const Address b = Address::chunks_first(queries + first_query * kHeadDim * 2, lane());
        clear(s);
        multiply<T, kHeadDim / 16, kKeyTiles, kTiles>(
            [&](int m) -> float(&)[kTiles][4] { return s[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, b.at(16 * n, 2 * step)); }, between);
    }

    /// The warp's columns of its own queries of a turn, as the right factor of its sums.
    __device__ static __forceinline__ Address own_columns(const char* queries, int turn) {
        const int first_query = query_part() * (kQueries * kTurns) + turn * kQueries;
        return {queries + first_query * (kHeadDim * 2), lane() % 16, first_sum_chunk() + lane() / 16};
    }
    /// dV += P^T dO of the warp's own queries of a turn; P^T comes from registers, rounded.
    template <class Between>
    __device__ __forceinline__ void add_own_dv(Sums& dv, const Scores& p, const char* d_o, int turn,
                                               const Between& between) const {
        const Address b = own_columns(d_o, turn);
        multiply<T, kQueries / 16, kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return dv[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&x)[4] = p[m][2 * step + i / 2];
                    to[i] = ptx::pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
                }
            },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }
    /// dK += dS^T Q of the warp's own queries of a turn. `ds`: the tile that has them.
    template <class Between>
    __device__ __forceinline__ void add_own_dk(Sums& dk, const char* ds, const char* q, int turn,
                                               const Between& between) const {
        const MatrixAddress<kBlockQ> a(ds, first_sum_row() + lane() % 16, first_column(turn) / kChunk + lane() / 16);
        const Address b = own_columns(q, turn);
        multiply<T, kQueries / 16, kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return dk[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }

    /// dQ of a tile of the step's by half of the warps: each has 32 queries and half of the columns. Returns where its
    /// first four lie in the workspace: they are those of two warps of DqTile.
    __device__ __forceinline__ float* make_dq_of_tile(float (&dq)[2][4][4], const Planned& planned, int buffer) const {
        static_assert(kHeadDim == 64);
        const int queries = warp() % 4 / 2;
        const int columns = warp() % 2;
        const MatrixAddress<kBlockQ> ds(inputs.ds(warp() / 4 + buffer), lane() / 16 * 8 + lane() % 8,
                                        queries * 4 + lane() / 8 % 2);
        const Address k(inputs.k_tile(), lane() % 16, columns * 4 + lane() / 16);
        clear(dq);
        multiply<T, kConfig.block_kv() / 16, 2, 4>(
            [&](int m) -> float(&)[4][4] { return dq[m]; },
            [&](int step, int m, std::uint32_t(&a)[4]) { ptx::ldmatrix_x4_trans(a, ds.at(16 * step, 2 * m)); },
            [&](int step, int n, std::uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, k.at(16 * step, 2 * n)); },
            NothingBetween{});
        return planned.dq + warp() / 4 * DqTile<kHeadDim>::kFloats +
               DqTile<kHeadDim>::offset(0, 0, (queries * 4 + columns * 2) * 32 + lane());
    }
};

}  // namespace tessera::cuda::gradient
