// SPDX-License-Identifier: Apache-2.0
//
// Runs after the main kernel: dQ = scale * (the sum of its accumulators), rounded. One CTA for each query block of a
// head.
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/common/nonfinite.cuh"
#include "cuda/fa3/backward/common/query_tile.cuh"
#include "cuda/fa3/backward/common/store_gradient.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kConvertThreads = 128 * Config::kConsumers;

template <class T, class Shape>
__global__ void __launch_bounds__(kConvertThreads, 2) dq_convert_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kColumns = kConfig.block_q == Config::kRows ? kConfig.head_dim / 2 : kConfig.head_dim;
    __shared__ __align__(16) T tile[kConfig.block_q][kConfig.head_dim + 8];
    const ForwardParams& p = launch.params.forward;
    if (launch.workspace.state->cu_seqlens_decreased != 0) return;
    const auto [batch, head, m] = query_block_at<kConfig>(launch, static_cast<int>(blockIdx.x));
    const Sequence sequence = sequence_of(p, batch);
    ScheduleOf<kConfig> schedule;
    schedule.set_of(launch.schedule, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group);
    if (m < 0 || m >= schedule.count_q) return;

    const int thread = static_cast<int>(threadIdx.x);
    const int half = thread / 128;
    const std::int64_t block =
        std::int64_t{head} * launch.blocks_q + first_block_q(p, kConfig.block_q, batch, sequence.first_q) + m;
    const std::int64_t all = std::int64_t{p.heads_q} * launch.blocks_q;
    float sum[kColumns / 2] = {};
    for (int accumulator = 0; accumulator < 2; ++accumulator) {
        if (!schedule.has_contributions(accumulator, m)) continue;
        const auto* from = reinterpret_cast<const float4*>(
            launch.workspace.dq + ((accumulator * all + block) * 2 + half) * (Config::kRows * kColumns));
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const float4 four = from[128 * j + thread % 128];
            sum[4 * j] += four.x;
            sum[4 * j + 1] += four.y;
            sum[4 * j + 2] += four.z;
            sum[4 * j + 3] += four.w;
        }
    }
    const float factor =
        kFp16Scaled<T> ? p.scale / ds_scale<T>(launch, batch, head / p.group, head % p.group / schedule.heads_per_split)
                       : p.scale;
    const bool by_columns = kConfig.block_q == Config::kRows;
    const int row = (by_columns ? 0 : Config::kRows * half) + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
        const int column = (by_columns ? kColumns * half : 0) + column_of(i) + 2 * (thread % 4);
        *reinterpret_cast<std::uint32_t*>(&tile[row + 8 * row_of(i)][column]) =
            ptx::pack<T>(fmaf(sum[i], factor, 0.0F), fmaf(sum[i + 1], factor, 0.0F));  // no -0
    }
    __syncthreads();
    const Rows& dq = launch.params.dq;
    const std::int64_t first_row = sequence.first_q + std::int64_t{m} * kConfig.block_q;
    T* out = reinterpret_cast<T*>(dq.data) + (p.cu_seqlens_q != nullptr ? 0 : batch * dq.batch) + head * dq.head +
             first_row * dq.row;
    const int rows = min(kConfig.block_q, schedule.len_q - m * kConfig.block_q);
    store_rows<kConvertThreads>(tile, dq, out, rows, p.head_dim, launch.gradients.vector_dq);
    if (launch.workspace.state->nonfinite_keys == 0) return;
    __syncthreads();
    const DqPart part{p.cu_seqlens_q != nullptr ? 0 : batch,
                      head,
                      sequence.first_q,
                      sequence.first_kv,
                      m * kConfig.block_q,
                      rows,
                      0,
                      kConfig.head_dim};
    store_nan_of_keys<T>(launch, schedule, part, thread, kConvertThreads);
}

template <class T, class Shape>
cudaError_t launch_dq_convert(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesAddingDq::kHas<Shape> && !Shape::kConfig.splits_dv_dk(),
                  "not in that list of backward_config.h");
    return start(dq_convert_kernel<T, Shape>, query_block_count(launch), kConvertThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
