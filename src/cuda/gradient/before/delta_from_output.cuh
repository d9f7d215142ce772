// SPDX-License-Identifier: Apache-2.0
//
// delta = dO . (O + o_residual) - dLSE, for a forward that has kept the low-order bits of O: no GEMM. P then comes from
// the LSE of the forward. Rows whose |LSE| is too large for that are left to delta_kernel.
#pragma once

#include "cuda/backward/fp16_scale.cuh"
#include "cuda/backward/output_rows.cuh"
#include "cuda/backward/ragged_keys.cuh"
#include "cuda/gradient/before/delta.cuh"

namespace tessera::cuda::gradient {

inline constexpr int kOutputThreads = 256;

/// dO . (O + o_residual) of the thread's rows, and in fp16 their |dO|^2. The rows are kRowStride apart in kTiles tiles
/// of kBlockQ. All loads start before the first use, or most of the time would be latency.
template <class T, int kChunks>
struct OutputRows {
    static constexpr int kTiles = kChunks == 1 ? 2 : 1;  // two for short rows, whose set-up is half of the instructions
    static constexpr int kRowStride = kOutputThreads / kRowThreads;
    static constexpr int kRows = kTiles * kBlockQ / kRowStride;
    static constexpr bool kFp16 = std::is_same_v<T, __half>;

    float dot[kRows];
    float squares[kRows] = {};

    __device__ __forceinline__ OutputRows(const OutputAndGradient<T>& output, int first, int len) {
        const int part = static_cast<int>(threadIdx.x) % kRowThreads;
        OutputChunk chunks[kRows][kChunks];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int column = 8 * (part + kRowThreads * c);
                const int row = first + kRowStride * r;
                if (row >= len || column >= output.dim) continue;
                if (output.vector) chunks[r][c] = output.load(row, column);
                else
                    chunks[r][c] = {output.o.template chunk<uint4>(row, column, output.dim, false),
                                    output.d_o.template chunk<uint4>(row, column, output.dim, false),
                                    output.residual.template chunk<uint2>(row, column, output.dim, false)};
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float sum = 0;
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                chunks[r][c].template add_to<T>(sum);
                if constexpr (kFp16) chunks[r][c].template add_squares_to<T>(squares[r]);
            }
            dot[r] = sum_of_row(sum);
            if constexpr (kFp16) squares[r] = sum_of_row(squares[r]);
        }
    }
};

/// Writes the row data of a query; `lse` is -inf for a query that does not exist. Returns |delta|, or 0 if it is not
/// finite.
__device__ __forceinline__ float write_row(const Launch& launch, float dot, float lse, const float* dlse, int query,
                                           RowTile& to) {
    const BackwardParams& p = launch.params;
    const int row = query % kBlockQ;
    const bool sees_keys = lse != -INFINITY;
    const float offset = sees_keys ? lse * kLog2E : INFINITY;
    float delta = sees_keys ? dot : 0.0F;
    if (sees_keys && dlse != nullptr) delta -= dlse[query * p.dlse.row];
    const bool left = sees_keys && fabsf(offset) >= kOrdinaryOffset;
    to.offset[row] = offset;
    to.delta[row] = delta;
    to.norm[row] = left ? kRowLeft : 0.0F;
    to.max[row] = 0;
    if (left) launch.counters->rows_left = 1;
    return finite_or_0(fabsf(delta));
}

/// Rows of V of one CTA, if a thread has `chunks` chunks of a row. All are loaded at once.
constexpr int value_rows(int chunks) { return 256 / chunks; }

/// Tiles of so many rows of V of a head: over all sequences of a ragged call, or of one sequence.
__host__ __device__ __forceinline__ std::int64_t value_tiles_of_head(const ForwardParams& p, int rows) {
    return p.cu_seqlens_kv != nullptr ? p.total_kv / rows + p.batch : (p.len_kv + rows - 1) / rows;
}

/// fp16: the largest |row|^2 of V among the rows of one CTA that some query sees, since |dP| <= |dO| |V|.
template <class T, int kChunks>
__device__ __forceinline__ void bound_values(const Launch& launch, unsigned number) {
    const ForwardParams& p = launch.params.forward;
    constexpr int kTileRows = value_rows(kChunks);
    constexpr int kRowStride = kOutputThreads / kRowThreads;
    constexpr int kRows = kTileRows / kRowStride;
    const auto tiles = static_cast<unsigned>(value_tiles_of_head(p, kTileRows));
    const unsigned pair = number / tiles;
    auto tile = static_cast<int>(number % tiles);
    std::int64_t batch = pair / static_cast<unsigned>(p.heads_kv);
    auto kv_head = static_cast<int>(pair % static_cast<unsigned>(p.heads_kv));
    if (p.cu_seqlens_kv != nullptr) {
        const QueryTile of = ragged_key_tile(p, tile, kTileRows);
        batch = of.batch, kv_head = static_cast<int>(pair), tile = of.block;
    }
    const Sequence sequence = sequence_of(p, batch);
    const Band32 band(p.mask.bind(sequence.len_q, sequence.len_kv));
    const int begin = max(band.first(0), 0);
    const int end = band.last(sequence.len_q - 1) + 1;
    const HeadRows v(p.v, batch, sequence.first_kv, kv_head, sizeof(T));
    const int part = static_cast<int>(threadIdx.x) % kRowThreads;
    const int first = tile * kTileRows + static_cast<int>(threadIdx.x) / kRowThreads;
    OutputChunk chunks[kRows][kChunks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int row = first + kRowStride * r;
            const int column = 8 * (part + kRowThreads * c);
            if (row < begin || row >= end || column >= p.head_dim_v) continue;
            chunks[r][c].d_o = v.template chunk<uint4>(row, column, p.head_dim_v, launch.vector_v);
        }
    }
    float largest = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float squares = 0;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) chunks[r][c].template add_squares_to<T>(squares);
        largest = fmaxf(largest, finite_or_0(sum_of_row(squares)));
    }
    raise_bound(launch.v_squares[batch * p.heads_kv + kv_head], largest);
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kOutputThreads, kChunks > 2 ? 2 : 3)
    delta_from_output_kernel(const __grid_constant__ Launch launch) {
    using Output = OutputRows<T, kChunks>;
    const ForwardParams& p = launch.params.forward;
    constexpr int kQueries = Output::kTiles * kBlockQ;
    if constexpr (Output::kFp16) {
        const auto of_queries = static_cast<unsigned>(tiles_of_heads(p, kQueries));
        if (blockIdx.x >= of_queries) {
            bound_values<T, kChunks>(launch, blockIdx.x - of_queries);
            return;
        }
    }
    const HeadTile of = head_tile_at(p, blockIdx.x, kQueries);
    const int tile = of.tile * Output::kTiles;
    const std::int64_t batch = of.batch;
    const int head = of.head;
    const Sequence sequence = sequence_of(p, batch);
    if (tile < 0 || tile * kBlockQ >= sequence.len_q) return;
    const auto rows_of_head = [&](const Rows& rows, int size) {
        return HeadRows(rows, batch, sequence.first_q, head, size);
    };
    const OutputAndGradient<T> output{rows_of_head(p.o, sizeof(T)), rows_of_head(launch.o_residual, 1),
                                      rows_of_head(launch.params.d_o, sizeof(T)), p.head_dim_v, launch.vector_residual};
    const auto* lse = reinterpret_cast<const float*>(rows_of_head(p.lse, sizeof(float)).data);
    const Rows& dlse_rows = launch.params.dlse;
    const float* dlse =
        dlse_rows.data ? reinterpret_cast<const float*>(rows_of_head(dlse_rows, sizeof(float)).data) : nullptr;
    RowTile* const to = launch.rows + first_tile(launch, sequence, batch, head) + tile;
    const int first = tile * kBlockQ + static_cast<int>(threadIdx.x) / kRowThreads;
    float lses[Output::kRows];  // loaded before the rows, so that both latencies overlap
#pragma unroll
    for (int r = 0; r < Output::kRows; ++r) {
        const int query = first + r * Output::kRowStride;
        lses[r] = query < sequence.len_q ? lse[query * p.lse.row] : -INFINITY;
    }
    const Output rows(output, first, sequence.len_q);
    float largest_delta = 0;
    float largest_squares = 0;
#pragma unroll
    for (int r = 0; r < Output::kRows; ++r) {
        const int query = first + r * Output::kRowStride;
        const int tile_of_row = r / (Output::kRows / Output::kTiles);
        if (threadIdx.x % kRowThreads != 0 || (tile + tile_of_row) * kBlockQ >= sequence.len_q) continue;
        const float delta = write_row(launch, rows.dot[r], lses[r], dlse, query, to[tile_of_row]);
        if constexpr (Output::kFp16) {
            largest_delta = fmaxf(largest_delta, delta);
            largest_squares = fmaxf(largest_squares, finite_or_0(rows.squares[r]));
        }
    }
    if constexpr (Output::kFp16) {
        raise_bound(launch.ds_scales[batch * p.heads_q + head], largest_delta);
        raise_bound(launch.do_squares[batch * p.heads_q + head], largest_squares);
    }
}

template <class T>
cudaError_t start_delta_from_output(const Launch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.params.forward;
    const int chunks = p.head_dim_v <= 64 ? 1 : p.head_dim_v <= 128 ? 2 : 4;
    const int tiles = chunks == 1 ? OutputRows<T, 1>::kTiles : 1;
    std::int64_t blocks = tiles_of_heads(p, tiles * kBlockQ);
    if (std::is_same_v<T, __half>) {
        const std::int64_t heads = p.heads_kv * (p.cu_seqlens_kv != nullptr ? 1 : p.batch);
        blocks += heads * value_tiles_of_head(p, value_rows(chunks));
    }
    const auto kernel = chunks == 1   ? delta_from_output_kernel<T, 1>
                        : chunks == 2 ? delta_from_output_kernel<T, 2>
                                      : delta_from_output_kernel<T, 4>;
    return start(kernel, blocks, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
