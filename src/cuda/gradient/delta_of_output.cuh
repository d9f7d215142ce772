// SPDX-License-Identifier: Apache-2.0
//
// delta[i] = dO . (O + residual) - dLSE[i] where the caller has kept what rounding took off O: no product. P comes from
// the LSE that the forward wrote; rows where that is too large for it are left to delta_kernel, which then does nothing
// else.
#pragma once

#include "cuda/gradient/delta.cuh"
#include "cuda/tile/residual.cuh"

namespace tessera::cuda::gradient {

inline constexpr int kOutputThreads = 256;

/// dO . (O + residual) of the thread's rows, and in fp16 the largest |dO|^2: rows kApart apart, of kTiles tiles of
/// kBlockQ. Where columns lie together all are read at once: one after the other, the latency of memory would be most
/// of the time.
template <class T, int kChunks>
struct OutputRows {
    static constexpr int kTiles = kChunks == 1 ? 2 : 1;  // short rows: half of the instructions stand before them
    static constexpr int kApart = kOutputThreads / kRowThreads;
    static constexpr int kRows = kTiles * kBlockQ / kApart;
    static constexpr bool kHeld = std::is_same_v<T, __half>;

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
                const int row = first + kApart * r;
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
                if constexpr (kHeld) chunks[r][c].template add_squares_to<T>(squares[r]);
            }
            dot[r] = sum_of_row(sum);
            if constexpr (kHeld) squares[r] = sum_of_row(squares[r]);
        }
    }
};

/// What is no number counts as nothing: nobody who sees it has gradients.
__device__ __forceinline__ float finite_or_0(float x) { return x < INFINITY ? x : 0.0F; }

/// The largest of a warp's numbers >= 0, to that of a head: its order does not show. All lanes come.
__device__ __forceinline__ void raise_limit(float* limit, float of_lane) {
    const int most = __reduce_max_sync(0xFFFFFFFF, __float_as_int(of_lane));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(reinterpret_cast<int*>(limit), most);
}

/// Row data of a row of a head, given its LSE, -inf where it does not exist. Returns |delta|, 0 where it is not finite.
__device__ __forceinline__ float write_row(const Launch& launch, float dot, float lse, const float* dlse, int query,
                                           RowTile& to) {
    const BackwardParams& p = launch.params;
    const int row = query % kBlockQ;
    const bool sees_keys = lse != -INFINITY;
    const float offset = sees_keys ? lse * kLog2E : INFINITY;
    float delta = sees_keys ? dot : 0.0F;
    if (sees_keys && dlse != nullptr) delta -= dlse[query * p.dlse.row];
    const bool left = sees_keys && fabsf(offset) >= kOrdinaryLse;
    to.offset[row] = offset;
    to.delta[row] = delta;
    to.norm[row] = left ? kLeft : 0.0F;
    to.max[row] = 0;
    if (left) launch.progress->some_left = 1;
    return finite_or_0(fabsf(delta));
}

/// Rows of V of one thread block, all read at once; a thread has `chunks` chunks of one.
constexpr int value_rows(int chunks) { return 256 / chunks; }

/// The largest row of a tile of V that somebody sees, in fp16: |dP| is at most |dO| |V|.
template <class T, int kChunks>
__device__ __forceinline__ void limit_values(const Launch& launch, unsigned number) {
    const ForwardParams& p = launch.params.forward;
    constexpr int kTileRows = value_rows(kChunks);
    constexpr int kApart = kOutputThreads / kRowThreads;
    constexpr int kRows = kTileRows / kApart;
    const auto tiles = static_cast<unsigned>((p.len_kv + kTileRows - 1) / kTileRows);
    const std::int64_t head = number / tiles;
    const std::int64_t batch = head / p.heads_kv;
    const int kv_head = static_cast<int>(head % p.heads_kv);
    const Sequence sequence = sequence_of(p, batch);
    const Visible visible(p.mask.bind(sequence.len_q, sequence.len_kv));
    const int begin = max(visible.first(0), 0);
    const int end = visible.last(sequence.len_q - 1) + 1;
    const HeadRows v(p.v, batch, sequence.first_kv, kv_head, sizeof(T));
    const int part = static_cast<int>(threadIdx.x) % kRowThreads;
    const int first = static_cast<int>(number % tiles) * kTileRows + static_cast<int>(threadIdx.x) / kRowThreads;
    OutputChunk chunks[kRows][kChunks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int row = first + kApart * r;
            const int column = 8 * (part + kRowThreads * c);
            if (row < begin || row >= end || column >= p.head_dim_v) continue;
            chunks[r][c].d_o = v.template chunk<uint4>(row, column, p.head_dim_v, launch.vector_v);
        }
    }
    float limit = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float squares = 0;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) chunks[r][c].template add_squares_to<T>(squares);
        limit = fmaxf(limit, finite_or_0(sum_of_row(squares)));
    }
    raise_limit(launch.v_squares + head, limit);
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kOutputThreads, kChunks > 2 ? 2 : 3)
    delta_of_output_kernel(const __grid_constant__ Launch launch) {
    using Output = OutputRows<T, kChunks>;
    const ForwardParams& p = launch.params.forward;
    const unsigned blocks = static_cast<unsigned>(launch.q_tiles + Output::kTiles - 1) / Output::kTiles;  // of a head
    const unsigned pair = blockIdx.x / blocks;
    if constexpr (Output::kHeld) {
        const unsigned heads = static_cast<unsigned>(p.batch) * static_cast<unsigned>(p.heads_q);
        if (pair >= heads) {
            limit_values<T, kChunks>(launch, blockIdx.x - heads * blocks);
            return;
        }
    }
    const int tile = static_cast<int>(blockIdx.x - pair * blocks) * Output::kTiles;
    const unsigned of_batch = pair / static_cast<unsigned>(p.heads_q);
    const std::int64_t batch = of_batch;
    const int head = static_cast<int>(pair - of_batch * static_cast<unsigned>(p.heads_q));
    const Sequence sequence = sequence_of(p, batch);
    if (threadIdx.x == 0 && falls(p, batch)) launch.progress->broken = 1;
    if (tile * kBlockQ >= sequence.len_q) return;
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
    float lses[Output::kRows];  // asked for before the rows: behind them the latency of memory would come twice
#pragma unroll
    for (int r = 0; r < Output::kRows; ++r) {
        const int query = first + r * Output::kApart;
        lses[r] = query < sequence.len_q ? lse[query * p.lse.row] : -INFINITY;
    }
    const Output rows(output, first, sequence.len_q);
    float largest_delta = 0;
    float largest_squares = 0;
#pragma unroll
    for (int r = 0; r < Output::kRows; ++r) {
        const int query = first + r * Output::kApart;
        const int place = r / (Output::kRows / Output::kTiles);
        if (threadIdx.x % kRowThreads != 0 || (tile + place) * kBlockQ >= sequence.len_q) continue;
        const float delta = write_row(launch, rows.dot[r], lses[r], dlse, query, to[place]);
        if constexpr (Output::kHeld) {
            largest_delta = fmaxf(largest_delta, delta);
            largest_squares = fmaxf(largest_squares, finite_or_0(rows.squares[r]));
        }
    }
    if constexpr (Output::kHeld) {
        raise_limit(launch.limits + pair, largest_delta);
        raise_limit(launch.do_squares + pair, largest_squares);
    }
}

template <class T>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.params.forward;
    const int chunks = p.head_dim_v <= 64 ? 1 : p.head_dim_v <= 128 ? 2 : 4;
    const int tiles = chunks == 1 ? OutputRows<T, 1>::kTiles : 1;
    std::int64_t blocks = p.batch * p.heads_q * ((launch.q_tiles + tiles - 1) / tiles);
    const int rows = value_rows(chunks);
    if (std::is_same_v<T, __half>) blocks += p.batch * p.heads_kv * ((p.len_kv + rows - 1) / rows);
    const auto kernel = chunks == 1   ? delta_of_output_kernel<T, 1>
                        : chunks == 2 ? delta_of_output_kernel<T, 2>
                                      : delta_of_output_kernel<T, 4>;
    return start(kernel, blocks, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
