// SPDX-License-Identifier: Apache-2.0
//
// delta[i] = dO . (O + rest) - dLSE[i] where the caller has kept what rounding took off O: no product, so it takes the
// time of reading O, dO and the bytes. It writes all that delta_kernel does. Rows with a large |LSE| are left to that
// kernel, which then does nothing else: their P wants the largest score, which only the scores tell.
#pragma once

#include "cuda/fa3/backward/delta.cuh"
#include "cuda/tile/rest.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kOutputThreads = 256;

/// What is found out about 64 queries.
struct OutputFlags {
    int some_special, some_large;
};

template <class T, Config kConfig>
struct OutputDelta {
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

    /// Row `row` of 64; a row past the end is one without keys. All threads of a warp come together.
    __device__ __forceinline__ void run(int batch, int query, int row, RowStats& stats, OutputFlags& flags) const {
        const int part = static_cast<int>(threadIdx.x) % kRowThreads;
        const BackwardParams& p = launch.params;
        const bool exists = query < tile.blocks.len_q;
        const float lse = exists ? of_row(p.forward.lse, batch, query) : -INFINITY;
        float2 share = exists ? rows.dot(query, part) : float2{0, 0};
        // NaN and infinities in Q are seen in the LSE, but not through a softcap, nor where no key is seen.
        if (kConfig.general && p.forward.softcap != 0 && exists) {
            share.y += zero_of_row<T>(q, query, p.forward.head_dim, part);
        }
        const float dot = sum_of_row(share.x);
        const float zero = sum_of_row(share.y);
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
        stats.delta[place] = delta;
        stats.inverse_sum[place] = 0;
        if (exists && (zero != 0 || !isfinite(lse))) flags.some_special = 1;
        if (large) flags.some_large = 1;
    }
};

template <class T, class Shape>
__global__ void __launch_bounds__(kOutputThreads) delta_of_output_kernel(const __grid_constant__ Launch launch) {
    __shared__ OutputFlags flags[Config::kConsumers];  // of 64 queries each
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < Config::kConsumers) flags[thread] = {};
    __syncthreads();
    constexpr Config kConfig = Shape::kConfig;
    const QueryTile<kConfig> tile(launch);
    const ForwardParams& p = launch.params.forward;
    if (thread == 0 && falls(p, tile.batch)) launch.workspace.start->broken = 1;
    if (tile.query >= tile.blocks.len_q) return;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
    const OutputDelta<T, kConfig> output(launch, tile, batch);
    RowStats* const stats = launch.workspace.stats + tile.first_block * kConfig.row_stats();
#pragma unroll 2
    for (int pass = 0; pass < kDeltaBlockQ * kRowThreads / kOutputThreads; ++pass) {
        const int row = pass * (kOutputThreads / kRowThreads) + thread / kRowThreads;
        const int part = row / 64;
        if (!tile.has_stats(part)) break;  // the same for the whole pass
        output.run(batch, tile.query + row, row % 64, stats[part], flags[part]);
    }
    __syncthreads();
    if (thread >= Config::kConsumers || !tile.has_stats(thread)) return;
    stats[thread].some_special = flags[thread].some_special;
    stats[thread].some_large = flags[thread].some_large;
    if (flags[thread].some_large) launch.workspace.start->some_large = 1;
    clear_counters(launch, tile.first_block + tile.block_of(thread));
}

template <class T, class Shape>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.params.forward;
    const std::int64_t tiles = (p.len_q + kDeltaBlockQ - 1) / kDeltaBlockQ;
    return start(delta_of_output_kernel<T, Shape>, p.batch * p.heads_q * tiles, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
