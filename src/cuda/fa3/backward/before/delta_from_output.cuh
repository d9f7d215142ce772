// SPDX-License-Identifier: Apache-2.0
//
// delta[i] = dO . (O + residual) - dLSE[i] where the caller has kept what rounding took off O: no product, so it takes
// the time of reading O, dO and the bytes. It writes all that delta_kernel does. Rows with a large |LSE| are left to
// that kernel, which then does nothing else: their P wants the largest score, which only the scores tell.
#pragma once

#include <algorithm>

#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/tile/residual.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kOutputThreads = 256;
inline constexpr int kOutputBlocks = 2;  ///< of a multiprocessor, by registers

/// This thread's share of row . row. `vector`: its chunks lie together.
template <class T>
__device__ __forceinline__ float squares_of_row(const HeadRows& rows, int row, int dim, int part, bool vector) {
    float sum = 0;
    for (int first = 8 * part; first < dim; first += 8 * kRowThreads) {
        const uint4 chunk = rows.chunk<uint4>(row, first, dim, vector);
        const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = ptx::unpack<T>(words[i / 2], i % 2);
            sum = fmaf(x, x, sum);
        }
    }
    return sum;
}

/// One warp: 64 queries of a head.
template <class T, Config kConfig>
struct OutputDelta {
    static constexpr int kRowsAtOnce = 32 / kRowThreads;
    static constexpr int kChunks =
        (kConfig.head_dim_v + 8 * kRowThreads - 1) / (8 * kRowThreads);  ///< of a thread, in a row

    const Launch& launch;
    const QueryRows<kConfig>& queries;
    OutputAndGradient<T> rows;
    HeadRows q;
    int batch;  ///< of the tensors; ragged: 0
    RowStats& stats;
    bool some_nonfinite = false, some_large = false;
    Limits limits{};

    __device__ __forceinline__ OutputDelta(const Launch& of_launch, const QueryRows<kConfig>& of_queries, int of_batch)
        : launch(of_launch),
          queries(of_queries),
          rows{{of_launch.params.forward.o, of_batch, of_queries.first_q, of_queries.head, sizeof(T)},
               {of_launch.o_residual, of_batch, of_queries.first_q, of_queries.head, 1},
               {of_launch.params.d_o, of_batch, of_queries.first_q, of_queries.head, sizeof(T)},
               of_launch.params.forward.head_dim_v,
               of_launch.o_by_vectors},
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
        return query < queries.blocks.len_q ? of_row(launch.params.forward.lse, query) : -INFINITY;
    }

    __device__ __forceinline__ void run() {
        if (launch.o_by_vectors) {
            // These rows are read at once: one after the other the latency of memory would be most of the time.
            constexpr int kAtOnce = std::max(4 / kChunks, 1);
#pragma unroll 1
            for (int row = first_row(); row < Config::kRows; row += kAtOnce * kRowsAtOnce) run_at_once<kAtOnce>(row);
        } else {
#pragma unroll 1
            for (int row = first_row(); row < Config::kRows; row += kRowsAtOnce) run_one(row);
        }
        if (launch.params.forward.cu_seqlens_q != nullptr) look_past_end();
        if constexpr (kHeld<T>) {
            Limits& of_head = queries.limits(launch);
            raise_limit(of_head.d_o_squares, limits.d_o_squares);
            raise_limit(of_head.sum, limits.sum);
        }
        const bool nonfinite = __any_sync(kAllLanes, some_nonfinite);
        const bool large = __any_sync(kAllLanes, some_large);
        if (threadIdx.x % 32 != 0) return;
        stats.some_nonfinite = nonfinite ? 1 : 0;
        stats.some_large = large ? 1 : 0;
        if (large) launch.workspace.start->some_large = 1;
        if (queries.query % kConfig.block_q == 0) clear_counters(launch, queries.block());
    }

    /// Rows `row`, row + kRowsAtOnce, ..., whose columns lie together.
    template <int kRows>
    __device__ __forceinline__ void run_at_once(int row) {
        OutputChunk chunks[kRows][kChunks];
        float lse[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int query = queries.query + row + kRowsAtOnce * r;
            lse[r] = lse_of(query);
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int first = 8 * (part() + kRowThreads * c);
                if (query < queries.blocks.len_q && first < rows.dim) chunks[r][c] = rows.load(query, first);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float dot = 0, squares = 0;
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                chunks[r][c].template add_to<T>(dot);
                if constexpr (kHeld<T>) chunks[r][c].template add_squares_to<T>(squares);
            }
            store(row + kRowsAtOnce * r, lse[r], dot, squares);
        }
    }

    /// Any other row.
    __device__ __forceinline__ void run_one(int row) {
        const int query = queries.query + row;
        const bool exists = query < queries.blocks.len_q;
        const float dot = exists ? rows.dot(query, part()) : 0.0F;
        float squares = 0;
        if constexpr (kHeld<T>) {
            squares = exists ? squares_of_row<T>(rows.d_o, query, rows.dim, part(), rows.vector) : 0.0F;
        }
        store(row, lse_of(query), dot, squares);
    }

    /// What the eight threads of a row have: `share` of dO . (O + residual), `squares` of dO . dO. A row past the end
    /// is one without keys. In fp16 `limits` are raised to what the row has of them.
    __device__ __forceinline__ void store(int row, float lse, float share, float squares) {
        const BackwardParams& p = launch.params;
        const int query = queries.query + row;
        const bool exists = query < queries.blocks.len_q;
        const float dot = sum_of_row(share);
        // NaN and infinities of O and dO are in the sum; those of Q in the LSE, but not through a softcap, nor where no
        // key is seen.
        bool nonfinite = exists && (!isfinite(dot) || !isfinite(lse));
        if (kConfig.general && p.forward.softcap != 0) {
            const float zero = exists ? zero_of_row<T>(q, query, p.forward.head_dim, part()) : 0.0F;
            nonfinite |= sum_of_row(zero) != 0;
        }
        if constexpr (kHeld<T>) squares = sum_of_row(squares);
        if (part() != 0) return;
        const bool sees_keys = lse != -INFINITY;
        float delta = 0;
        if (sees_keys) {
            delta = dot;
            if (p.dlse.data != nullptr) delta -= of_row(p.dlse, query);
            if (!isfinite(delta)) delta = NAN;  // as delta_kernel has it
        }
        if constexpr (kHeld<T>) {
            if (sees_keys && isfinite(delta)) {
                limits.d_o_squares = fmaxf(limits.d_o_squares, finite_or_0(squares));
                limits.sum = fmaxf(limits.sum, fabsf(delta));
            }
        }
        some_nonfinite |= nonfinite;
        some_large |= fabsf(lse) > kOrdinaryLse && sees_keys;
        const int place = RowStats::place(row);
        stats.minus_lse[place] = sees_keys ? fmaf(-lse, kLog2E, kWeightExponent<T>) : -INFINITY;
        stats.delta[place] = delta;
        stats.inverse_sum[place] = 0;
    }

    /// Past the end of a ragged sequence the tiles of Q and dO hold rows of the next one.
    __device__ __forceinline__ void look_past_end() {
        const ForwardParams& p = launch.params.forward;
        const std::int64_t end = p.total_q - queries.first_q;
#pragma unroll 1
        for (int row = first_row(); row < Config::kRows; row += kRowsAtOnce) {
            const int query = queries.query + row;
            if (query < queries.blocks.len_q || query >= end) continue;
            const float zero =
                zero_of_row<T>(q, query, p.head_dim, part()) + zero_of_row<T>(rows.d_o, query, p.head_dim_v, part());
            if (zero != 0) some_nonfinite = true;
        }
    }
};

/// Of a query head of a sequence, pieces of 64 queries: those of all its blocks, at most.
template <Config kConfig>
__host__ __device__ constexpr int pieces_of_head(const ForwardParams& p) {
    return static_cast<int>((p.len_q + kConfig.block_q - 1) / kConfig.block_q) * kConfig.row_stats();
}
/// And of all of them.
template <Config kConfig>
__host__ __device__ constexpr std::int64_t output_pieces(const ForwardParams& p) {
    return std::int64_t{p.batch} * p.heads_q * pieces_of_head<kConfig>(p);
}

/// Pieces of 64 rows of V of a head of a sequence.
__host__ __device__ constexpr int value_pieces(const ForwardParams& p) {
    return static_cast<int>((p.len_kv + Config::kRows - 1) / Config::kRows);
}

/// One warp: the largest row of piece `number` of V, in fp16. Rows that are not finite count as nothing, for who sees
/// one has no delta; nor do those that nobody sees.
template <class T, Config kConfig>
__device__ __forceinline__ void limit_values(const Launch& launch, int number) {
    const ForwardParams& p = launch.params.forward;
    const int head = number / value_pieces(p);
    const int batch = head / p.heads_kv;
    const int kv_head = head - batch * p.heads_kv;
    const Sequence sequence = sequence_of(p, batch);
    BlocksOf<kConfig> blocks;
    blocks.set(p.mask, sequence.len_q, sequence.len_kv, p.group, p.heads_kv);
    const int begin = max(blocks.low, 0);
    const int end = min(blocks.len_q + blocks.high, blocks.len_kv);
    const HeadRows v(p.v, p.cu_seqlens_q != nullptr ? 0 : batch, sequence.first_kv, kv_head, sizeof(T));
    const int first = (number - head * value_pieces(p)) * Config::kRows;
    const int thread = static_cast<int>(threadIdx.x) % 32;
    float limit = 0;
#pragma unroll 4
    for (int row = first + thread / kRowThreads; row < first + Config::kRows; row += 32 / kRowThreads) {
        const bool counts = row >= begin && row < end;
        const float share = counts ? squares_of_row<T>(v, row, p.head_dim_v, thread % kRowThreads, true) : 0.0F;
        limit = fmaxf(limit, finite_or_0(sum_of_row(share)));
    }
    raise_limit(launch.limits[std::int64_t{head} * launch.shares].v_squares, limit);
}

/// A warp goes through several pieces; in fp16 those of V come last.
template <class T, class Shape>
__global__ void __launch_bounds__(kOutputThreads, kOutputBlocks)
    delta_of_output_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    const ForwardParams& p = launch.params.forward;
    const int pieces = static_cast<int>(output_pieces<kConfig>(p));
    const int of_values = kHeld<T> ? static_cast<int>(p.batch) * p.heads_kv * value_pieces(p) : 0;
    const int step = static_cast<int>(gridDim.x) * (kOutputThreads / 32);
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x * kOutputThreads + threadIdx.x) / 32; number < pieces + of_values;
         number += step) {
        if (number >= pieces) {
            if constexpr (kHeld<T>) limit_values<T, kConfig>(launch, number - pieces);
            continue;
        }
        const int batch_head = number / pieces_of_head<kConfig>(p);
        const int batch = batch_head / p.heads_q;
        const QueryRows<kConfig> queries(launch, batch, batch_head - batch * p.heads_q,
                                         (number - batch_head * pieces_of_head<kConfig>(p)) * Config::kRows);
        if (threadIdx.x % 32 == 0 && falls(p, batch)) launch.workspace.start->broken = 1;
        if (queries.exists()) OutputDelta<T, kConfig>(launch, queries, p.cu_seqlens_q != nullptr ? 0 : batch).run();
    }
}

template <class T, class Shape>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.params.forward;
    const std::int64_t pieces =
        output_pieces<Shape::kConfig>(p) + (kHeld<T> ? std::int64_t{p.batch} * p.heads_kv * value_pieces(p) : 0);
    const std::int64_t blocks = std::min<std::int64_t>((pieces + kOutputThreads / 32 - 1) / (kOutputThreads / 32),
                                                       std::int64_t{launch.multiprocessors} * kOutputBlocks);
    return start(delta_of_output_kernel<T, Shape>, blocks, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
