// SPDX-License-Identifier: Apache-2.0
//
// The mainloop in fp32 by multiply-adds, over head_dim 128. A thread owns keys 16 apart of dV and dK and queries 16
// apart of dQ, with four columns in every 64 of each.
#pragma once

#include "cuda/gradient/main/cta_work.cuh"
#include "cuda/gradient/main/tile_fp32.cuh"

namespace tessera::cuda::gradient {

template <ConfigFp32 kConfig>
struct MainloopFp32 {
    using Tile = TileFp32<kConfig>;
    using Scores = typename Tile::Scores;
    using Sums = float[Tile::kKeys][Tile::kColumns];
    static constexpr int kRowOfScores = Tile::kRowOfScores;
    static constexpr int kSharedBytes = kConfig.shared_bytes();

    const Launch& launch;
    const CtaWork& work;
    const Tile tile;
    float* const p;   // [queries][keys], with the dropout
    float* const ds;  // [queries][keys], the gradient of Q K^T divided by the scale

    __device__ MainloopFp32(const Launch& of, const CtaWork& its_work, char* memory)
        : launch(of),
          work(its_work),
          tile(memory),
          p(tile.v + Tile::kBlockKv * Tile::kRow),
          ds(p + Tile::kFloatsOfScores) {}

    __device__ void run(Sums& dv, Sums& dk) const {
        const int count = work.steps();
        const DqSemaphore semaphore{launch, work};
        const bool adds = work.adds_dq(launch);
        for (int i = 0; i < count; ++i) {
            const Step step(launch, work, i);
            const int first_query = step.tile * kBlockQ;
            __syncthreads();
            if (adds && i > 0) semaphore.release(Step(launch, work, i - 1));
            tile.load_queries(launch.params, work.sequence, work.batch, step.head, first_query);
            __syncthreads();
            compute_scores(step, first_query);
            if (adds) semaphore.acquire(step);
            __syncthreads();
            add(dv, p, tile.d_o, first_query);
            add(dk, ds, tile.q, first_query);
            if (adds) add_dq(step, first_query);
        }
        __syncthreads();
        if (adds && count > 0) semaphore.release(Step(launch, work, count - 1));
    }

    /// Writes dV or dK of the block, or adds them to those of the earlier parts of the queries. fmaf(x, f, 0) turns -0
    /// into +0.
    __device__ void store(const Sums& sums, const Rows& rows, int dim, float factor) const {
        if (rows.data == nullptr) return;
        auto* to = reinterpret_cast<float*>(rows.data +
                                            head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, 4));
#pragma unroll
        for (int j = 0; j < Tile::kKeys; ++j) {
            const int key = work.first_key + Tile::row() + 16 * j;
            if (key >= work.sequence.len_kv) continue;
#pragma unroll
            for (int n = 0; n < Tile::kColumns; ++n) {
                const int column = column_of(n);
                if (column >= dim) continue;
                float& element = to[key * rows.row + column * rows.column];
                element = fmaf(sums[j][n], factor, work.part > 0 ? element : 0.0F);
            }
        }
    }

 private:
    __device__ static __forceinline__ int column_of(int n) { return n / 4 * 64 + 4 * Tile::column() + n % 4; }

    /// Computes P and dS of the tile in shared memory; both are 0 where a query does not see a key.
    __device__ void compute_scores(const Step& step, int first_query) const {
        const ForwardParams& params = launch.params.forward;
        const ScoresFp32 scores(params, work.sequence, work.band32, work.batch, step.head);
        const RowTile& rows = launch.rows[DqSemaphore{launch, work}.tile(step)];
        Scores s;
        Scores dp;
        Tile::multiply(s, tile.q, tile.k);
        Tile::multiply(dp, tile.d_o, tile.v);
#pragma unroll
        for (int i = 0; i < Tile::kQueries; ++i) {
#pragma unroll
            for (int j = 0; j < Tile::kKeys; ++j) {
                const int row = Tile::row() + 16 * i;
                const int column = Tile::column() + 16 * j;
                const int query = first_query + row;
                const int key = work.first_key + column;
                float kept = 0;
                float gradient = 0;
                if (scores.sees(query, key)) {
                    float slope;
                    const float prob = probability_fp32(rows, row, scores.score(s[i][j], query, key, slope));
                    const float factor = scores.dropout(query, key);
                    kept = factor == 0 ? 0.0F : prob * factor;
                    gradient = prob * ((factor == 0 ? 0.0F : dp[i][j] * factor) - rows.delta[row]) * slope;
                }
                p[row * kRowOfScores + column] = kept;
                ds[row * kRowOfScores + column] = gradient;
            }
        }
    }

    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < work.sequence.len_q && work.band32.sees(query, key);
    }

    /// sums[key] += the sum over the queries that see the key of a[query][key] * x[query]: dV by P and dO, dK by dS and
    /// Q. The tile is summed on its own first, since long sums would lose digits. Hidden pairs are left out, since 0
    /// times Inf or NaN is NaN.
    __device__ void add(Sums& sums, const float* a, const float* x, int first_query) const {
        Sums part = {};
#pragma unroll 2
        for (int q = 0; q < kBlockQ; ++q) {
            float w[Tile::kKeys];
            bool wanted[Tile::kKeys];
#pragma unroll
            for (int j = 0; j < Tile::kKeys; ++j) {
                const int key = Tile::row() + 16 * j;
                w[j] = a[q * kRowOfScores + key];
                wanted[j] = sees(first_query + q, work.first_key + key);
            }
#pragma unroll
            for (int n = 0; n < Tile::kColumns / 4; ++n) {
                const float4 value = Tile::vector(x + q * Tile::kRow + 64 * n + 4 * Tile::column());
#pragma unroll
                for (int j = 0; j < Tile::kKeys; ++j) {
                    if (!wanted[j]) continue;
                    part[j][4 * n] = fmaf(w[j], value.x, part[j][4 * n]);
                    part[j][4 * n + 1] = fmaf(w[j], value.y, part[j][4 * n + 1]);
                    part[j][4 * n + 2] = fmaf(w[j], value.z, part[j][4 * n + 2]);
                    part[j][4 * n + 3] = fmaf(w[j], value.w, part[j][4 * n + 3]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < Tile::kKeys; ++j) {
#pragma unroll
            for (int n = 0; n < Tile::kColumns; ++n) sums[j][n] += part[j][n];
        }
    }

    /// Adds dQ of the query tile to the sum of the earlier key blocks in the workspace, [queries][columns].
    __device__ void add_dq(const Step& step, int first_query) const {
        const DqSemaphore semaphore{launch, work};
        float part[Tile::kQueries][Tile::kColumns] = {};
#pragma unroll 2
        for (int key = 0; key < Tile::kBlockKv; ++key) {
            float w[Tile::kQueries];
            bool wanted[Tile::kQueries];
#pragma unroll
            for (int i = 0; i < Tile::kQueries; ++i) {
                const int row = Tile::row() + 16 * i;
                w[i] = ds[row * kRowOfScores + key];
                wanted[i] = sees(first_query + row, work.first_key + key);
            }
#pragma unroll
            for (int n = 0; n < Tile::kColumns / 4; ++n) {
                const float4 value = Tile::vector(tile.k + key * Tile::kRow + 64 * n + 4 * Tile::column());
#pragma unroll
                for (int i = 0; i < Tile::kQueries; ++i) {
                    if (!wanted[i]) continue;
                    part[i][4 * n] = fmaf(w[i], value.x, part[i][4 * n]);
                    part[i][4 * n + 1] = fmaf(w[i], value.y, part[i][4 * n + 1]);
                    part[i][4 * n + 2] = fmaf(w[i], value.z, part[i][4 * n + 2]);
                    part[i][4 * n + 3] = fmaf(w[i], value.w, part[i][4 * n + 3]);
                }
            }
        }
        float* const to = launch.dq + semaphore.index(step) * kBlockQ * Tile::kHeadDim;
        const bool first = semaphore.is_first(step);
#pragma unroll
        for (int i = 0; i < Tile::kQueries; ++i) {
#pragma unroll
            for (int n = 0; n < Tile::kColumns / 4; ++n) {
                auto* at = reinterpret_cast<float4*>(to + (Tile::row() + 16 * i) * Tile::kHeadDim + 64 * n +
                                                     4 * Tile::column());
                float4 sum = {part[i][4 * n], part[i][4 * n + 1], part[i][4 * n + 2], part[i][4 * n + 3]};
                if (!first) {
                    const float4 old = __ldcg(at);
                    sum = {old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w};
                }
                __stcg(at, sum);
            }
        }
    }
};

}  // namespace tessera::cuda::gradient
