// SPDX-License-Identifier: Apache-2.0
//
// delta[i] = dO . (O + rest) - dLSE[i] where the caller has kept what rounding took off O: no product, so it takes the
// time of reading O, dO and the bytes. It writes all that delta_kernel does. Rows with a large |LSE| are left to that
// kernel, which then does nothing else: their P wants the largest score, which only the scores tell.
#pragma once

#include <algorithm>

#include "cuda/fa3/backward/delta.cuh"
#include "cuda/tile/rest.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kOutputThreads = 256;
/// Is a thread block to go through several tiles? In bf16 at head_dim 64 one for each tile took 69 us instead of 58; at
/// 128 55 instead of 58 (16,384 rows of 2,048 numbers, H200). In fp16 it takes more registers than three have.
template <class T, Config kConfig>
inline constexpr bool kSeveralTiles = !kHeld<T> && !kConfig.general && kConfig.head_dim_v <= 64;
/// Thread blocks of a multiprocessor, by registers.
template <class T, Config kConfig>
inline constexpr int kOutputBlocks = kSeveralTiles<T, kConfig> ? 3 : 2;

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

/// What is found out about 64 queries.
struct OutputFlags {
    int some_special, some_large;
};

template <class T, Config kConfig>
struct OutputDelta {
    static constexpr int kChunksOfRow =
        (kConfig.head_dim_v + 8 * kRowThreads - 1) / (8 * kRowThreads);  ///< of a thread

    const Launch& launch;
    const QueryTile<kConfig>& tile;
    OutputAndGradient<T> rows;
    HeadRows q;

    __device__ __forceinline__ OutputDelta(const Launch& of_launch, const QueryTile<kConfig>& of_tile, int batch)
        : launch(of_launch),
          tile(of_tile),
          rows{{of_launch.params.forward.o, batch, of_tile.first_q, of_tile.head, sizeof(T)},
               {of_launch.o_rest, batch, of_tile.first_q, of_tile.head, 1},
               {of_launch.params.d_o, batch, of_tile.first_q, of_tile.head, sizeof(T)},
               of_launch.params.forward.head_dim_v,
               of_launch.o_by_vectors},
          q(of_launch.params.forward.q, batch, of_tile.first_q, of_tile.head, sizeof(T)) {}

    __device__ __forceinline__ float of_row(const Rows& numbers, int batch, int query) const {
        return reinterpret_cast<const float*>(numbers.data)[batch * numbers.batch + tile.head * numbers.head +
                                                            (std::int64_t{tile.first_q} + query) * numbers.row];
    }

    __device__ __forceinline__ float lse_of(int batch, int query) const {
        return query < tile.blocks.len_q ? of_row(launch.params.forward.lse, batch, query) : -INFINITY;
    }

    /// Row `row` of 64. All threads of a warp come together.
    __device__ __forceinline__ void run(int batch, int query, int row, RowStats& stats, OutputFlags& flags,
                                        Limits& limits) const {
        const int part = static_cast<int>(threadIdx.x) % kRowThreads;
        const bool exists = query < tile.blocks.len_q;
        const float lse = lse_of(batch, query);
        const float2 share = exists ? rows.dot(query, part) : float2{0, 0};
        float squares = 0;
        if constexpr (kHeld<T>) {
            squares = exists ? squares_of_row<T>(rows.d_o, query, rows.dim, part, rows.vector) : 0.0F;
        }
        store(batch, query, row, lse, share, squares, stats, flags, limits);
    }

    /// The same where columns lie together, of the thread's rows kApart apart in the tile: all are read at once, as one
    /// after the other the latency of memory would be most of the time.
    template <int kRows, int kApart>
    __device__ __forceinline__ void run_at_once(int batch, int row, RowStats* stats, OutputFlags* flags,
                                                Limits& limits) const {
        constexpr int kChunks = kChunksOfRow;
        const int part = static_cast<int>(threadIdx.x) % kRowThreads;
        OutputChunk chunks[kRows][kChunks];
        float lse[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int query = tile.query + row + kApart * r;
            lse[r] = lse_of(batch, query);
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int first = 8 * (part + kRowThreads * c);
                if (query < tile.blocks.len_q && first < rows.dim) chunks[r][c] = rows.load(query, first);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int at = row + kApart * r;
            if (!tile.has_stats(at / 64)) break;  // the same for all threads
            float2 share{0, 0};
            float squares = 0;
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                chunks[r][c].template add_to<T>(share);
                if constexpr (kHeld<T>) chunks[r][c].template add_squares_to<T>(squares);
            }
            store(batch, tile.query + at, at % 64, lse[r], share, squares, stats[at / 64], flags[at / 64], limits);
        }
    }

    /// What the eight threads of a row have: `share` of dO . (O + rest) and of 0 * dO, `squares` of dO . dO. A row past
    /// the end is one without keys. In fp16 `limits` are raised to what the row has of them.
    __device__ __forceinline__ void store(int batch, int query, int row, float lse, float2 share, float squares,
                                          RowStats& stats, OutputFlags& flags, Limits& limits) const {
        const int part = static_cast<int>(threadIdx.x) % kRowThreads;
        const BackwardParams& p = launch.params;
        const bool exists = query < tile.blocks.len_q;
        // NaN and infinities in Q are seen in the LSE, but not through a softcap, nor where no key is seen.
        if (kConfig.general && p.forward.softcap != 0 && exists) {
            share.y += zero_of_row<T>(q, query, p.forward.head_dim, part);
        }
        const float dot = sum_of_row(share.x);
        const float zero = sum_of_row(share.y);
        if constexpr (kHeld<T>) squares = sum_of_row(squares);
        if (part != 0) return;
        const bool large = fabsf(lse) > kOrdinaryLse && lse != -INFINITY;
        const bool sees_keys = lse != -INFINITY;
        float delta = 0;
        if (sees_keys) {
            delta = dot;
            if (p.dlse.data != nullptr) delta -= of_row(p.dlse, batch, query);
            if (!isfinite(delta)) delta = NAN;  // as delta_kernel has it
        }
        const int place = RowStats::place(row);
        stats.minus_lse[place] = sees_keys ? -lse * kLog2E : -INFINITY;
        if constexpr (kHeld<T>) {
            if (sees_keys) stats.minus_lse[place] = fmaf(-lse, kLog2E, kWeightExponent<T>);
            if (sees_keys && isfinite(delta)) {
                limits.d_o_squares = fmaxf(limits.d_o_squares, finite_or_0(squares));
                limits.sum = fmaxf(limits.sum, fabsf(delta));
            }
        }
        stats.delta[place] = delta;
        stats.inverse_sum[place] = 0;
        if (exists && (zero != 0 || !isfinite(lse))) flags.some_special = 1;
        if (large) flags.some_large = 1;
    }

    /// Past the end of a ragged member the tiles of Q and dO hold rows of the next one.
    __device__ __forceinline__ void look_past_end(OutputFlags* flags) const {
        const ForwardParams& p = launch.params.forward;
        const int thread = static_cast<int>(threadIdx.x);
        const int part = thread % kRowThreads;
        const std::int64_t end = p.total_q - tile.first_q;
#pragma unroll 1
        for (int row = thread / kRowThreads; row < kDeltaBlockQ; row += kOutputThreads / kRowThreads) {
            const int query = tile.query + row;
            if (query < tile.blocks.len_q || query >= end) continue;
            const float zero =
                zero_of_row<T>(q, query, p.head_dim, part) + zero_of_row<T>(rows.d_o, query, p.head_dim_v, part);
            if (zero != 0) flags[row / 64].some_special = 1;
        }
    }
};

/// Tiles of kDeltaBlockQ rows of V of each head and member.
__host__ __device__ __forceinline__ std::int64_t value_tiles(const ForwardParams& p) {
    return (p.len_kv + kDeltaBlockQ - 1) / kDeltaBlockQ;
}

/// The largest row of tile `number` of V, in fp16. Rows that are not finite count as nothing, for who sees one has no
/// delta; nor do those that nobody sees.
template <class T, Config kConfig>
__device__ __forceinline__ void limit_values(const Launch& launch, std::int64_t number) {
    const ForwardParams& p = launch.params.forward;
    const std::int64_t head = number / value_tiles(p);
    const int batch = static_cast<int>(head / p.heads_kv);
    const int kv_head = static_cast<int>(head % p.heads_kv);
    const Member member = member_of(p, batch);
    BlocksOf<kConfig> blocks;
    blocks.set(p.mask, member.len_q, member.len_kv, p.group, p.heads_kv);
    const int begin = max(blocks.low, 0);
    const int end = min(blocks.len_q + blocks.high, blocks.len_kv);
    const HeadRows v(p.v, p.cu_seqlens_q != nullptr ? 0 : batch, member.first_kv, kv_head, sizeof(T));
    const int first = static_cast<int>(number % value_tiles(p)) * kDeltaBlockQ;
    const int thread = static_cast<int>(threadIdx.x);
    float limit = 0;
#pragma unroll 4
    for (int row = thread / kRowThreads; row < kDeltaBlockQ; row += kOutputThreads / kRowThreads) {
        const bool counts = first + row >= begin && first + row < end;
        const float share = counts ? squares_of_row<T>(v, first + row, p.head_dim_v, thread % kRowThreads, true) : 0.0F;
        limit = fmaxf(limit, finite_or_0(sum_of_row(share)));
    }
    raise_limit(launch.limits[head * launch.shares].v_squares, limit);
}

/// Tile `number` of queries.
template <class T, Config kConfig>
__device__ __forceinline__ void sum_of_output(const Launch& launch, int number,
                                              OutputFlags (&flags)[Config::kConsumers]) {
    const int thread = static_cast<int>(threadIdx.x);
    const QueryTile<kConfig> tile(launch, place_by_heads(launch, number));
    const ForwardParams& p = launch.params.forward;
    if (thread == 0 && falls(p, tile.batch)) launch.workspace.start->broken = 1;
    if (tile.query >= tile.blocks.len_q) return;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
    const OutputDelta<T, kConfig> output(launch, tile, batch);
    RowStats* const stats = launch.workspace.stats + tile.first_block * kConfig.row_stats();
    Limits limits{};
    constexpr int kPasses = kDeltaBlockQ * kRowThreads / kOutputThreads;
    constexpr int kApart = kOutputThreads / kRowThreads;
    const int first_row = thread / kRowThreads;
    if (launch.o_by_vectors) {
        constexpr int kAtOnce = std::max(kPasses / OutputDelta<T, kConfig>::kChunksOfRow, 1);
#pragma unroll 1
        for (int pass = 0; pass < kPasses; pass += kAtOnce) {
            output.template run_at_once<kAtOnce, kApart>(batch, first_row + pass * kApart, stats, flags, limits);
        }
    } else {
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = pass * kApart + first_row;
            const int part = row / 64;
            if (!tile.has_stats(part)) break;  // the same for the whole pass
            output.run(batch, tile.query + row, row % 64, stats[part], flags[part], limits);
        }
    }
    if (p.cu_seqlens_q != nullptr) output.look_past_end(flags);
    if constexpr (kHeld<T>) {
        raise_limit(tile.limits(launch).d_o_squares, limits.d_o_squares);
        raise_limit(tile.limits(launch).sum, limits.sum);
    }
    __syncthreads();
    if (thread >= Config::kConsumers || !tile.has_stats(thread)) return;
    stats[thread].some_special = flags[thread].some_special;
    stats[thread].some_large = flags[thread].some_large;
    if (flags[thread].some_large) launch.workspace.start->some_large = 1;
    clear_counters(launch, tile.first_block + tile.block_of(thread));
}

/// Tiles of queries, and in fp16 of V behind them.
template <class T>
__host__ __device__ __forceinline__ std::int64_t output_tiles(const ForwardParams& p) {
    return query_tiles(p) + (kHeld<T> ? std::int64_t{p.batch} * p.heads_kv * value_tiles(p) : 0);
}

template <class T, class Shape>
__global__ void __launch_bounds__(kOutputThreads, kOutputBlocks<T, Shape::kConfig>)
    delta_of_output_kernel(const __grid_constant__ Launch launch) {
    __shared__ OutputFlags flags[Config::kConsumers];  // of 64 queries each
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x); number < output_tiles<T>(launch.params.forward);
         number += static_cast<int>(gridDim.x)) {
        if constexpr (kHeld<T>) {
            const std::int64_t beyond = number - query_tiles(launch.params.forward);
            if (beyond >= 0) {
                limit_values<T, Shape::kConfig>(launch, beyond);
                continue;
            }
        }
        if (threadIdx.x < Config::kConsumers) flags[threadIdx.x] = {};
        __syncthreads();
        sum_of_output<T, Shape::kConfig>(launch, number, flags);
    }
}

template <class T, class Shape>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream) {
    std::int64_t blocks = output_tiles<T>(launch.params.forward);
    if constexpr (kSeveralTiles<T, Shape::kConfig>) {  // as many as run at once
        blocks = std::min<std::int64_t>(blocks, launch.multiprocessors * kOutputBlocks<T, Shape::kConfig>);
    }
    return start(delta_of_output_kernel<T, Shape>, blocks, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
