// SPDX-License-Identifier: Apache-2.0
//
// Kernels whose CTAs own a query tile: they compute S and dP of all keys that those queries see, and keep neither.
#pragma once

#include "cuda/gradient/workspace.cuh"
#include "cuda/host/block_range.hpp"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::gradient {

/// A query tile of one head, and the key tiles that it sees.
struct RowWork {
    Sequence sequence;
    std::int64_t batch = 0;
    int head = 0;
    int q_begin = 0;
    ScoreInputs scores;
    Band32 band;
    BlockRange tiles;

    RowWork() = default;
    __device__ RowWork(const ForwardParams& p, std::int64_t in_batch, int of_head, int first_query, int block_q,
                       int block_kv)
        : sequence(sequence_of(p, in_batch)), batch(in_batch), head(of_head), q_begin(first_query) {
        scores = ScoreInputs(p, batch, head);
        const Band bound = p.mask.bind(sequence.len_q, sequence.len_kv);
        band = Band32(bound);
        if (exists()) tiles = BlockRange(bound, q_begin, min(q_begin + block_q, sequence.len_q), block_kv);
    }
    __device__ __forceinline__ bool exists() const { return q_begin >= 0 && q_begin < sequence.len_q; }
};

/// The two GEMMs of such a kernel, S = Q K^T and dP = dO V^T, with 16 queries a warp. Shared memory holds Q, dO, then K
/// and V for each stage.
template <class T, RowConfig kConfig>
struct RowGemms {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kTiles = kConfig.block_kv / 8;
    using Scores = float[1][kTiles][4];  // [16 queries][8 keys][4]

    const Launch& launch;
    const RowWork& work;
    char* shared;

    __device__ static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ static __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / 32 * 16; }
    __device__ __forceinline__ int query() const { return work.q_begin + first_row() + lane() / 4; }
    __device__ __forceinline__ int key(int tile) const { return tile * kConfig.block_kv + lane() % 4 * 2; }

    /// Calls f(s, dp, tile) for every key tile in [begin, end), in ascending order. s is in units of the natural
    /// logarithm if kConfig is general, else without the scale, and -inf where a query does not see a key. dp includes
    /// the dropout, and is 0 there.
    template <class F>
    __device__ __forceinline__ void for_each_tile(int begin, int end, const F& f) const {
        const BlockRange& tiles = work.tiles;
        const int first = max(begin, tiles.begin);
        const int last = min(end, tiles.end);
        if (first >= last) return;
        load_queries();
        load_keys(first, 0);
#pragma unroll 1
        for (int tile = first; tile < last; ++tile) {
            const int stage = (tile - first) % kConfig.kStages;
            ptx::cp_async_wait<0>();
            __syncthreads();
            if (tile + 1 < last) load_keys(tile + 1, 1 - stage);
            Scores s;
            Scores dp;
            multiply(s, dp, stage);
            if (tiles.full(tile)) modify<false>(s, dp, tile);
            else modify<true>(s, dp, tile);
            f(s, dp, tile);
        }
        __syncthreads();
    }

 private:
    __device__ __forceinline__ char* k_tile(int stage) const {
        return shared + 2 * kConfig.q_bytes() + stage * 2 * kConfig.kv_bytes();
    }
    __device__ __forceinline__ char* v_tile(int stage) const { return k_tile(stage) + kConfig.kv_bytes(); }

    __device__ __forceinline__ void load_queries() const {
        const ForwardParams& p = launch.params.forward;
        const Rows& d_o = launch.params.d_o;
        const std::int64_t q = head_offset(p.q, work.batch, work.sequence.first_q, work.head, sizeof(T));
        const std::int64_t from = head_offset(d_o, work.batch, work.sequence.first_q, work.head, sizeof(T));
        load<kConfig.block_q(), kHeadDim, kConfig.threads()>(
            shared, source_of<T>(p.q, q, work.sequence.len_q, p.head_dim, launch.vector_q), work.q_begin);
        load<kConfig.block_q(), kHeadDim, kConfig.threads()>(
            shared + kConfig.q_bytes(), source_of<T>(d_o, from, work.sequence.len_q, p.head_dim_v, launch.vector_do),
            work.q_begin);
    }
    __device__ __forceinline__ void load_keys(int tile, int stage) const {
        const ForwardParams& p = launch.params.forward;
        const int kv_head = work.head / p.group;
        const std::int64_t k = head_offset(p.k, work.batch, work.sequence.first_kv, kv_head, sizeof(T));
        const std::int64_t v = head_offset(p.v, work.batch, work.sequence.first_kv, kv_head, sizeof(T));
        const int first = tile * kConfig.block_kv;
        load<kConfig.block_kv, kHeadDim, kConfig.threads()>(
            k_tile(stage), source_of<T>(p.k, k, work.sequence.len_kv, p.head_dim, launch.vector_k), first);
        load<kConfig.block_kv, kHeadDim, kConfig.threads()>(
            v_tile(stage), source_of<T>(p.v, v, work.sequence.len_kv, p.head_dim_v, launch.vector_v), first);
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void multiply(Scores& s, Scores& dp, int stage) const {
        Queries<kHeadDim, 1, false> q(shared, first_row(), lane());
        multiply_qk<T>(s, q, MatrixAddress<kHeadDim>::chunks_first(k_tile(stage), lane()));
        Queries<kHeadDim, 1, false> d_o(shared + kConfig.q_bytes(), first_row(), lane());
        multiply_qk<T>(dp, d_o, MatrixAddress<kHeadDim>::chunks_first(v_tile(stage), lane()));
    }

    /// Softcap, ALiBi, bias and dropout (general shapes), and the mask.
    template <bool kMasked>
    __device__ __forceinline__ void modify(Scores& s, Scores& dp, int tile) const {
        const ForwardParams& p = launch.params.forward;
        if constexpr (kConfig.general) {
            const HeadScores<T> scores(p, work.sequence, work.batch, work.head, work.scores);
            scores.template transform<kMasked>(s[0], work.band, query(), key(tile));
            if (scores.drops()) {
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) dp[0][j][e] *= p.keep_scale;
                }
                scores.drop(dp[0], query(), key(tile), lane());
            }
        } else if constexpr (kMasked) {
            apply_mask(s[0], work.band, query(), key(tile));
        }
        if constexpr (kMasked) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (!work.band.sees(query() + e / 2 * 8, key(tile) + 8 * j + e % 2)) dp[0][j][e] = 0;
                }
            }
        }
    }
};

}  // namespace tessera::cuda::gradient
