// SPDX-License-Identifier: Apache-2.0
//
// delta[i] = dO . (O + rest) - dLSE[i] where the caller has kept what rounding took off O: no product. P comes from the
// LSE that the forward wrote; rows where that is too large for it are left to delta_kernel, which then does nothing
// else.
#pragma once

#include "cuda/gradient/delta.cuh"
#include "cuda/tile/rest.cuh"

namespace tessera::cuda::gradient {

inline constexpr int kOutputThreads = 256;

/// One row of a head; all eight threads of a row come together, and its first one writes.
template <class T>
__device__ __forceinline__ void write_row(const Launch& launch, const OutputAndGradient<T>& output, const float* lse,
                                          const float* dlse, bool exists, int query, RowTile& to) {
    const BackwardParams& p = launch.params;
    const int part = static_cast<int>(threadIdx.x) % kRowThreads;
    const float dot = sum_of_row(exists ? output.dot(query, part).x : 0.0F);
    if (part != 0) return;
    const int row = query % kBlockQ;
    const float of_row = exists ? lse[query * p.forward.lse.row] : -INFINITY;
    const bool sees_keys = of_row != -INFINITY;
    const float offset = sees_keys ? of_row * kLog2E : INFINITY;
    float delta = sees_keys ? dot : 0.0F;
    if (sees_keys && dlse != nullptr) delta -= dlse[query * p.dlse.row];
    const bool left = sees_keys && fabsf(offset) >= kOrdinaryLse;
    to.offset[row] = offset;
    to.delta[row] = delta;
    to.norm[row] = left ? kLeft : 0.0F;
    to.max[row] = 0;
    if (left) launch.progress->some_left = 1;
}

template <class T>
__global__ void __launch_bounds__(kOutputThreads) delta_of_output_kernel(const __grid_constant__ Launch launch) {
    const ForwardParams& p = launch.params.forward;
    const unsigned pair = blockIdx.x / static_cast<unsigned>(launch.q_tiles);
    const int tile = static_cast<int>(blockIdx.x % static_cast<unsigned>(launch.q_tiles));
    const std::int64_t batch = pair / static_cast<unsigned>(p.heads_q);
    const int head = static_cast<int>(pair % static_cast<unsigned>(p.heads_q));
    const Member member = member_of(p, batch);
    if (threadIdx.x == 0 && falls(p, batch)) launch.progress->broken = 1;
    if (tile * kBlockQ >= member.len_q) return;
    const auto rows_of_head = [&](const Rows& rows, int size) {
        return HeadRows(rows, batch, member.first_q, head, size);
    };
    const OutputAndGradient<T> output{rows_of_head(p.o, sizeof(T)), rows_of_head(launch.o_rest, 1),
                                      rows_of_head(launch.params.d_o, sizeof(T)), p.head_dim_v, launch.vector_rest};
    const auto* lse = reinterpret_cast<const float*>(rows_of_head(p.lse, sizeof(float)).data);
    const Rows& dlse_rows = launch.params.dlse;
    const float* dlse =
        dlse_rows.data ? reinterpret_cast<const float*>(rows_of_head(dlse_rows, sizeof(float)).data) : nullptr;
    RowTile& to = launch.rows[first_tile(launch, member, batch, head) + tile];
#pragma unroll
    for (int pass = 0; pass < kBlockQ * kRowThreads / kOutputThreads; ++pass) {
        const int row = pass * (kOutputThreads / kRowThreads) + static_cast<int>(threadIdx.x) / kRowThreads;
        const int query = tile * kBlockQ + row;
        write_row<T>(launch, output, lse, dlse, query < member.len_q, query, to);
    }
}

template <class T>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.params.forward;
    return start(delta_of_output_kernel<T>, p.batch * p.heads_q * launch.q_tiles, kOutputThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
