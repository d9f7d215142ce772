// SPDX-License-Identifier: Apache-2.0
//
// The kernels of fp32 whose CTAs own a query tile: delta with the LSE, and the gradient of the bias.
#pragma once

#include <new>

#include "cuda/gradient/after/bias_task.cuh"
#include "cuda/gradient/before/query_tile.cuh"
#include "cuda/gradient/main/tile_fp32.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/parts.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::gradient {

/// m, l and the sum of P dP of one row, over the keys of one thread. The sums are in fp64, since one fp32 number that a
/// million terms are added to loses the digits of each.
struct DeltaFp32 {
    float max = -INFINITY;
    double sum = 0;
    double sum_p_dp = 0;

    __device__ __forceinline__ void rescale(float to) {
        const float m = to == -INFINITY ? 0.0F : to;  // no visible key yet: exp(-inf - 0) = 0
        const float factor = expf(max - m);
        sum *= factor;
        sum_p_dp *= factor;
        max = to;
    }
    __device__ __forceinline__ void add(float score, float dp) {
        const float p = expf(score - (max == -INFINITY ? 0.0F : max));
        sum += p;
        sum_p_dp += double{p} * double{dp};
    }
    /// Reduces over the 16 threads of a row.
    __device__ __forceinline__ void finish() {
        float found = max;
#pragma unroll
        for (int lane = 1; lane < 16; lane *= 2) found = fmaxf(found, __shfl_xor_sync(kAllLanes, found, lane));
        rescale(found);
#pragma unroll
        for (int lane = 1; lane < 16; lane *= 2) {
            sum += __shfl_xor_sync(kAllLanes, sum, lane);
            sum_p_dp += __shfl_xor_sync(kAllLanes, sum_p_dp, lane);
        }
    }
    /// `sink`: of the head; -inf: none. It has a part of the sum, and its dP is 0.
    __device__ __forceinline__ void store(RowTile& to, int row, float dlse, float sink) const {
        const bool empty = max == -INFINITY && sum == 0;
        const double all = sum + (sink == -INFINITY ? 0 : exp(double{sink} - double{max}));
        to.offset[row] = 0;
        to.delta[row] = empty ? sink == -INFINITY ? 0.0F : -dlse : static_cast<float>(sum_p_dp / all - dlse);
        to.norm[row] = empty ? 0.0F : static_cast<float>(1 / all);
        to.max[row] = max == -INFINITY ? 0.0F : max;
    }
};

template <ConfigFp32 kConfig>
struct RowsFp32 {
    using Tile = TileFp32<kConfig>;
    const Launch& launch;
    const RowWork& work;
    const Tile tile;

    __device__ __forceinline__ int query(int i) const { return work.q_begin + Tile::row() + 16 * i; }
    __device__ __forceinline__ int key(int number, int j) const {
        return number * Tile::kBlockKv + Tile::column() + 16 * j;
    }

    /// Calls f(s, dp, number) for the key tiles in [begin, end) that some query sees, in ascending order. s and dp are
    /// Q K^T and dO V^T, unscaled.
    template <class F>
    __device__ void for_each_tile(int begin, int end, const F& f) const {
        const int first = max(begin, work.tiles.begin);
        const int last = min(end, work.tiles.end);
        if (first >= last) return;
        const ForwardParams& p = launch.params.forward;
        tile.load_queries(launch.params, work.sequence, work.batch, work.head, work.q_begin);
        for (int number = first; number < last; ++number) {
            __syncthreads();
            tile.load_keys(p, work.sequence, work.batch, work.head / p.group, number * Tile::kBlockKv);
            __syncthreads();
            typename Tile::Scores s;
            typename Tile::Scores dp;
            Tile::multiply(s, tile.q, tile.k);
            Tile::multiply(dp, tile.d_o, tile.v);
            f(s, dp, number);
        }
    }
};

/// delta = dO . O - dLSE, since O in fp32 is exact enough. P then comes from the LSE of the forward, and the norm is 1.
/// Rows whose |LSE| is too large for that are left to delta_fp32_kernel. Sixteen threads share a row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) delta_from_output_fp32_kernel(const __grid_constant__ Launch launch) {
    const BackwardParams& p = launch.params;
    const auto [batch, head, tile] = head_tile_at(p.forward, blockIdx.x, kBlockQ);
    const Sequence sequence = sequence_of(p.forward, batch);
    if (tile < 0 || tile * kBlockQ >= sequence.len_q) return;
    const auto rows_of_head = [&](const Rows& rows) {
        return reinterpret_cast<const float*>(rows.data + head_offset(rows, batch, sequence.first_q, head, 4));
    };
    const SourceFp32 o(p.forward.o, head_offset(p.forward.o, batch, sequence.first_q, head, 4), sequence.len_q,
                       p.forward.head_dim_v, launch.vector_residual);
    const SourceFp32 d_o(p.d_o, head_offset(p.d_o, batch, sequence.first_q, head, 4), sequence.len_q,
                         p.forward.head_dim_v, launch.vector_residual);
    RowTile& to = launch.rows[first_tile(launch, sequence, batch, head) + tile];
    constexpr int kLanes = 16;
    for (int row = static_cast<int>(threadIdx.x) / kLanes; row < kBlockQ; row += kThreads / kLanes) {
        const int query = tile * kBlockQ + row;
        float dot = 0;
        for (int column = static_cast<int>(threadIdx.x) % kLanes * 4; column < o.dim; column += 4 * kLanes) {
            const float4 a = o.four(query, column);
            const float4 b = d_o.four(query, column);
            dot += fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
        }
#pragma unroll
        for (int lane = 1; lane < kLanes; lane *= 2) dot += __shfl_xor_sync(kAllLanes, dot, lane);
        if (threadIdx.x % kLanes != 0) continue;
        const float lse = query < sequence.len_q ? rows_of_head(p.forward.lse)[query * p.forward.lse.row] : -INFINITY;
        const bool sees_keys = lse != -INFINITY;
        const float dlse = sees_keys && p.dlse.data ? rows_of_head(p.dlse)[query * p.dlse.row] : 0.0F;
        const bool left = sees_keys && !(fabsf(lse) < kOrdinaryLse);
        to.offset[row] = 0;
        to.delta[row] = sees_keys ? dot - dlse : 0.0F;
        to.norm[row] = left ? kRowLeft : sees_keys ? 1.0F : 0.0F;
        to.max[row] = sees_keys ? lse : 0.0F;
        if (left) launch.counters->rows_left = 1;
    }
}

template <class Shape>
__global__ void __launch_bounds__(256, 1) delta_fp32_kernel(const __grid_constant__ Launch launch) {
    using Rows32 = RowsFp32<Shape::kConfig>;
    using Tile = typename Rows32::Tile;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(RowWork) char work_memory[sizeof(RowWork)];
    const RowWork& work = *reinterpret_cast<const RowWork*>(work_memory);
    const ForwardParams& p = launch.params.forward;
    if (launch.delta_from_output && launch.counters->rows_left == 0) return;
    if (threadIdx.x == 0) {
        const HeadTile of = head_tile_at<true>(p, blockIdx.x, kBlockQ);
        new (work_memory) RowWork(p, of.batch, of.head, of.tile * kBlockQ, kBlockQ, Tile::kBlockKv);
    }
    __syncthreads();
    if (!work.exists()) return;
    RowTile& to = launch.rows[first_tile(launch, work.sequence, work.batch, work.head) + work.q_begin / kBlockQ];
    // With delta from O only the rows that were left are computed here.
    const bool left = launch.delta_from_output && threadIdx.x < kBlockQ && to.norm[threadIdx.x] == kRowLeft;
    if (launch.delta_from_output && !__syncthreads_or(left)) return;

    const Rows32 rows{launch, work, Tile(memory)};
    const ScoresFp32 scores(p, work.sequence, work.band, work.batch, work.head);
    DeltaFp32 sums[Tile::kQueries];
    rows.for_each_tile(0, work.tiles.end, [&](auto& s, const auto& dp, int number) {
#pragma unroll
        for (int i = 0; i < Tile::kQueries; ++i) {
            float found = sums[i].max;
#pragma unroll
            for (int j = 0; j < Tile::kKeys; ++j) {
                float slope;
                const int key = rows.key(number, j);
                s[i][j] =
                    scores.sees(rows.query(i), key) ? scores.score(s[i][j], rows.query(i), key, slope) : -INFINITY;
                found = fmaxf(found, s[i][j]);
            }
            sums[i].rescale(found);
#pragma unroll
            for (int j = 0; j < Tile::kKeys; ++j) {
                const int key = rows.key(number, j);
                if (!scores.sees(rows.query(i), key)) continue;
                const float factor = scores.dropout(rows.query(i), key);
                sums[i].add(s[i][j], factor == 0 ? 0.0F : dp[i][j] * factor);
            }
        }
    });
    const Rows& dlse = launch.params.dlse;
    const char* const from = dlse.data + head_offset(dlse, work.batch, work.sequence.first_q, work.head, 4);
#pragma unroll
    for (int i = 0; i < Tile::kQueries; ++i) {
        sums[i].finish();
        const int query = rows.query(i);
        if (Tile::column() != 0 || (launch.delta_from_output && to.norm[query % kBlockQ] != kRowLeft)) continue;
        const bool takes_dlse = dlse.data != nullptr && query < work.sequence.len_q;
        sums[i].store(to, query % kBlockQ,
                      takes_dlse ? *reinterpret_cast<const float*>(from + query * dlse.row * std::int64_t{4}) : 0.0F,
                      sink_of(p, work.head));
    }
}

template <class Shape>
__global__ void __launch_bounds__(256, 1) bias_fp32_kernel(const __grid_constant__ Launch launch) {
    using Rows32 = RowsFp32<Shape::kConfig>;
    using Tile = typename Rows32::Tile;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(RowWork) char work_memory[sizeof(RowWork)];
    const RowWork& work = *reinterpret_cast<const RowWork*>(work_memory);
    const ForwardParams& p = launch.params.forward;
    const int key_tiles = (p.len_kv + Tile::kBlockKv - 1) / Tile::kBlockKv;
    const BiasTask task(p, launch.params.dbias, blockIdx.x, launch.q_tiles, key_tiles);
    const Rows32 rows{launch, work, Tile(memory)};
    typename Tile::Scores total = {};
    typename Tile::Scores sums = {};
    int tiles = 0;  // in sums
    for (int batch = task.batches.begin; batch < task.batches.end; ++batch) {
        for (int head = task.heads.begin; head < task.heads.end; ++head) {
            for (int q_tile = task.q_tiles.begin; q_tile < task.q_tiles.end; ++q_tile) {
                __syncthreads();
                if (threadIdx.x == 0) {
                    new (work_memory) RowWork(p, batch, head, q_tile * kBlockQ, kBlockQ, Tile::kBlockKv);
                }
                __syncthreads();
                if (!work.exists()) break;
                const ScoresFp32 scores(p, work.sequence, work.band, work.batch, work.head);
                const RowTile& of = launch.rows[first_tile(launch, work.sequence, work.batch, work.head) + q_tile];
                rows.for_each_tile(task.key_tiles.begin, task.key_tiles.end, [&](auto& s, const auto& dp, int number) {
                    if (tiles++ == kTilesOfBiasPart) {
                        move_to_total(total, sums);
                        tiles = 1;
                    }
#pragma unroll
                    for (int i = 0; i < Tile::kQueries; ++i) {
#pragma unroll
                        for (int j = 0; j < Tile::kKeys; ++j) {
                            float slope;
                            const int query = rows.query(i);
                            const int key = rows.key(number, j);
                            if (!scores.sees(query, key)) continue;
                            const float prob =
                                probability_fp32(of, query % kBlockQ, scores.score(s[i][j], query, key, slope));
                            const float factor = scores.dropout(query, key);
                            sums[i][j] += prob * ((factor == 0 ? 0.0F : dp[i][j] * factor) - of.delta[query % kBlockQ]);
                        }
                    }
                });
            }
        }
    }
    move_to_total(total, sums);
    __syncthreads();
    auto* const shared = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < Tile::kQueries; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::kKeys; ++j) {
            shared[(Tile::row() + 16 * i) * Tile::kRowOfScores + Tile::column() + 16 * j] = total[i][j];
        }
    }
    __syncthreads();
    task.store<float, kBlockQ, Tile::kBlockKv>(p, launch.params.dbias, shared, Tile::kRowOfScores);
}

template <class Shape>
cudaError_t start_delta_fp32(const Launch& launch, cudaStream_t stream) {
    using Tile = TileFp32<Shape::kConfig>;
    const std::int64_t blocks = tiles_of_heads(launch.params.forward, kBlockQ);
    return start(delta_fp32_kernel<Shape>, blocks, Tile::kThreads, Tile::kFloats * 4, launch, stream);
}

template <class Shape>
cudaError_t start_bias_fp32(const Launch& launch, cudaStream_t stream) {
    using Tile = TileFp32<Shape::kConfig>;
    const int key_tiles = (launch.params.forward.len_kv + Tile::kBlockKv - 1) / Tile::kBlockKv;
    const std::int64_t blocks = bias_tasks(launch.params.forward, launch.params.dbias, launch.q_tiles, key_tiles);
    if (blocks == 0) return cudaSuccess;
    return start(bias_fp32_kernel<Shape>, blocks, Tile::kThreads, Tile::kFloats * 4, launch, stream);
}

}  // namespace tessera::cuda::gradient
