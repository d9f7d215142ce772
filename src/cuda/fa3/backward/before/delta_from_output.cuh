// SPDX-License-Identifier: Apache-2.0
//
// Runs before the main kernel, if the caller has kept the residual of O: RowStats with delta[i] = dO . (O + residual) -
// dLSE[i]. It needs no GEMM and is bound by reading O, dO and the residual. Rows with a large |LSE| are left to
// delta_kernel, since their P needs the row's largest score.
#pragma once

#include <algorithm>

#include "cuda/backward/output_rows.cuh"
#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/common/key_piece.cuh"
#include "cuda/fa3/backward/common/query_tile.cuh"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kOutputThreads = 256;
inline constexpr int kOutputCtas = 2;  ///< CTAs of a multiprocessor, as registers allow

/// One warp: 64 queries of a head.
template <class T, Config kConfig>
struct DeltaFromOutput {
    static constexpr int kRowStride = 32 / kRowThreads;
    static constexpr int kChunks = (kConfig.head_dim_v + 8 * kRowThreads - 1) /
                                   (8 * kRowThreads);  ///< chunks of eight columns that a thread has in a row

    const Launch& launch;
    const QueryRows<kConfig>& queries;
    OutputAndGradient<T> rows;
    HeadRows q;
    int batch;  ///< index in the tensors; ragged: 0
    RowStats& stats;
    bool some_nonfinite = false, some_large = false;
    DsBounds bounds{};

    __device__ __forceinline__ DeltaFromOutput(const Launch& of_launch, const QueryRows<kConfig>& of_queries,
                                               int of_batch)
        : launch(of_launch),
          queries(of_queries),
          rows{{of_launch.params.forward.o, of_batch, of_queries.first_q, of_queries.head, sizeof(T)},
               {of_launch.output.residual, of_batch, of_queries.first_q, of_queries.head, 1},
               {of_launch.params.d_o, of_batch, of_queries.first_q, of_queries.head, sizeof(T)},
               of_launch.params.forward.head_dim_v,
               of_launch.output.by_vectors},
          q(of_launch.params.forward.q, of_batch, of_queries.first_q, of_queries.head, sizeof(T)),
          batch(of_batch),
          stats(of_launch.workspace.stats[of_queries.stats()]) {}

    __device__ __forceinline__ static int part() { return static_cast<int>(threadIdx.x) % kRowThreads; }
    /// The first of the thread's rows.
    __device__ __forceinline__ static int first_row() { return static_cast<int>(threadIdx.x) % 32 / kRowThreads; }
    __device__ __forceinline__ float of_row(const Rows& numbers, int query) const {
        return reinterpret_cast<const float*>(numbers.data)[batch * numbers.batch + queries.head * numbers.head +
                                                            (std::int64_t{queries.first_q} + query) * numbers.row];
    }
    __device__ __forceinline__ float lse_of(int query) const {
        return query < queries.schedule.len_q ? of_row(launch.params.forward.lse, query) : -INFINITY;
    }

    __device__ __forceinline__ void run() {
        if (launch.output.by_vectors) {
            // The loads of several rows are issued together, to overlap the latency of memory.
            constexpr int kAtOnce = std::max(4 / kChunks, 1);
#pragma unroll 1
            for (int row = first_row(); row < Config::kRows; row += kAtOnce * kRowStride) run_rows<kAtOnce>(row);
        } else {
#pragma unroll 1
            for (int row = first_row(); row < Config::kRows; row += kRowStride) run_row(row);
        }
        if (launch.params.forward.cu_seqlens_q != nullptr) look_past_end();
        if constexpr (kFp16Scaled<T>) {
            DsBounds& of_split = queries.ds_bounds(launch);
            raise_bound(of_split.max_do_squares, bounds.max_do_squares);
            raise_bound(of_split.addend, bounds.addend);
        }
        const bool nonfinite = any_lane(some_nonfinite);
        const bool large = any_lane(some_large);
        if (threadIdx.x % 32 != 0) return;
        stats.some_nonfinite = nonfinite ? 1 : 0;
        stats.some_large = large ? 1 : 0;
        stats.slope = launch.params.forward.alibi_slope(queries.batch, queries.head);
        if (large) launch.workspace.state->some_large = 1;
        if (queries.query % kConfig.block_q == 0) clear_dq_semaphores(launch, queries.block());
    }

    /// Handles kRows rows `row`, row + kRowStride, ... that can be read by vectors.
    template <int kRows>
    __device__ __forceinline__ void run_rows(int row) {
        OutputChunk chunks[kRows][kChunks];
        float lse[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int query = queries.query + row + kRowStride * r;
            lse[r] = lse_of(query);
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int first = 8 * (part() + kRowThreads * c);
                if (query < queries.schedule.len_q && first < rows.dim) chunks[r][c] = rows.load(query, first);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float dot = 0, squares = 0;
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                chunks[r][c].template add_to<T>(dot);
                if constexpr (kFp16Scaled<T>) chunks[r][c].template add_squares_to<T>(squares);
            }
            store(row + kRowStride * r, lse[r], dot, squares);
        }
    }

    /// Handles one row of any strides.
    __device__ __forceinline__ void run_row(int row) {
        const int query = queries.query + row;
        const bool exists = query < queries.schedule.len_q;
        const float dot = exists ? rows.dot(query, part()) : 0.0F;
        float squares = 0;
        if constexpr (kFp16Scaled<T>) {
            squares = exists ? squares_of_row<T>(rows.d_o, query, rows.dim, part(), rows.vector) : 0.0F;
        }
        store(row, lse_of(query), dot, squares);
    }

    /// Stores the RowStats of a row. `part_of_dot` and `squares`: what each of its eight threads has summed of
    /// dO . (O + residual) and of dO . dO. A row past the end is one without keys.
    __device__ __forceinline__ void store(int row, float lse, float part_of_dot, float squares) {
        const BackwardParams& p = launch.params;
        const int query = queries.query + row;
        const bool exists = query < queries.schedule.len_q;
        const float dot = sum_of_row(part_of_dot);
        // NaN and infinities of O and dO show in the sum. Those of Q show in the LSE, except through a softcap or where
        // no key is seen.
        bool nonfinite = exists && (!isfinite(dot) || !isfinite(lse));
        if (kConfig.scores != Scores::plain && p.forward.softcap != 0) {
            const float zero = exists ? zero_of_row<T>(q, query, p.forward.head_dim, part()) : 0.0F;
            nonfinite |= sum_of_row(zero) != 0;
        }
        if constexpr (kFp16Scaled<T>) squares = sum_of_row(squares);
        if (part() != 0) return;
        const bool sees_keys = lse != -INFINITY;
        float delta = 0;
        if (sees_keys) {
            delta = dot;
            if (p.dlse.data != nullptr) delta -= of_row(p.dlse, query);
            if (!isfinite(delta)) delta = NAN;  // as in delta_kernel
        }
        if constexpr (kFp16Scaled<T>) {
            if (sees_keys && isfinite(delta)) {
                bounds.max_do_squares = fmaxf(bounds.max_do_squares, finite_or_0(squares));
                bounds.addend = fmaxf(bounds.addend, fabsf(delta));
            }
        }
        some_nonfinite |= nonfinite;
        some_large |= fabsf(lse) > kOrdinaryLse && sees_keys;
        const int slot = RowStats::slot(row);
        stats.minus_lse[slot] = sees_keys ? fmaf(-lse, kLog2E, kPScaleExponent<T>) : -INFINITY;
        stats.delta[slot] = delta;
        stats.inverse_sum[slot] = 0;
    }

    /// Looks for NaN past the end of a ragged sequence, where the tiles of Q and dO hold rows of the next one.
    __device__ __forceinline__ void look_past_end() {
        const ForwardParams& p = launch.params.forward;
        const std::int64_t end = p.total_q - queries.first_q;
#pragma unroll 1
        for (int row = first_row(); row < Config::kRows; row += kRowStride) {
            const int query = queries.query + row;
            if (query < queries.schedule.len_q || query >= end) continue;
            const float zero =
                zero_of_row<T>(q, query, p.head_dim, part()) + zero_of_row<T>(rows.d_o, query, p.head_dim_v, part());
            if (zero != 0) some_nonfinite = true;
        }
    }
};

/// Pieces of 64 queries: those of all query blocks.
template <Config kConfig>
__host__ __device__ __forceinline__ std::int64_t query_pieces(const Launch& launch) {
    return query_block_count(launch) * kConfig.row_stats();
}

/// fp16, one warp: raises max_v_squares to the largest row of piece `number` of V. It leaves out rows that no query
/// sees, and rows that are not finite, since a query that sees one has no finite delta.
template <class T, Config kConfig>
__device__ __forceinline__ void bound_v(const Launch& launch, int number) {
    const ForwardParams& p = launch.params.forward;
    const auto [batch, kv_head, first] = key_piece_at<kConfig>(launch, number);
    const Sequence sequence = sequence_of(p, batch);
    ScheduleOf<kConfig> schedule;
    schedule.set(p.mask, sequence.len_q, sequence.len_kv, p.group);
    const int begin = max(schedule.low, 0);
    const int end = min(schedule.len_q + schedule.high, schedule.len_kv());
    const HeadRows v(p.v, p.cu_seqlens_q != nullptr ? 0 : batch, sequence.first_kv, kv_head, sizeof(T));
    const int thread = static_cast<int>(threadIdx.x) % 32;
    float bound = 0;
#pragma unroll 4
    for (int row = first + thread / kRowThreads; row < first + Config::kRows; row += 32 / kRowThreads) {
        const bool counts = row >= begin && row < end;
        const float part = counts ? squares_of_row<T>(v, row, p.head_dim_v, thread % kRowThreads, true) : 0.0F;
        bound = fmaxf(bound, finite_or_0(sum_of_row(part)));
    }
    const std::int64_t head = std::int64_t{batch} * p.heads_kv + kv_head;
    raise_bound(launch.workspace.ds_bounds[head * launch.key_blocks.splits].max_v_squares, bound);
}

/// A warp goes through several pieces; in fp16 those of V come after those of O.
template <class T, class Shape>
__global__ void __launch_bounds__(kOutputThreads, kOutputCtas)
    delta_from_output_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    const ForwardParams& p = launch.params.forward;
    if (p.cu_seqlens_q != nullptr && launch.workspace.state->cu_seqlens_decreased != 0) return;
    const int pieces = static_cast<int>(query_pieces<kConfig>(launch));
    const int of_values = kFp16Scaled<T> ? static_cast<int>(key_piece_count<kConfig>(launch)) : 0;
    const int step = static_cast<int>(gridDim.x) * (kOutputThreads / 32);
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x * kOutputThreads + threadIdx.x) / 32; number < pieces + of_values;
         number += step) {
        if (number >= pieces) {
            if constexpr (kFp16Scaled<T>) bound_v<T, kConfig>(launch, number - pieces);
            continue;
        }
        const auto [batch, head, m] = query_block_at<kConfig>(launch, number / kConfig.row_stats());
        const QueryRows<kConfig> queries(launch, batch, head,
                                         m * kConfig.block_q + number % kConfig.row_stats() * Config::kRows);
        if (queries.exists()) DeltaFromOutput<T, kConfig>(launch, queries, p.cu_seqlens_q != nullptr ? 0 : batch).run();
    }
}

template <class T, class Shape>
cudaError_t launch_delta_from_output(const Launch& launch, cudaStream_t stream) {
    const std::int64_t pieces =
        query_pieces<Shape::kConfig>(launch) + (kFp16Scaled<T> ? key_piece_count<Shape::kConfig>(launch) : 0);
    const std::int64_t ctas = std::min<std::int64_t>((pieces + kOutputThreads / 32 - 1) / (kOutputThreads / 32),
                                                     std::int64_t{launch.multiprocessors} * kOutputCtas);
    return start(delta_from_output_kernel<T, Shape>, ctas, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
