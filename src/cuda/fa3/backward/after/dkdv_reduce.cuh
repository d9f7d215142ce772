// SPDX-License-Identifier: Apache-2.0
//
// Runs after the main kernel, with head splits or parts of queries: sums dK and dV over the splits, in order, and
// rounds them. One CTA for
// 64 keys of dK or of dV.
#pragma once

#include <algorithm>

#include "cuda/fa3/backward/common/store_gradient.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kReduceThreads = 128;
inline constexpr int kReduceKeys = 64;  ///< keys of a CTA, which is one warpgroup

/// The keys of a CTA.
struct ReducedKeys {
    int batch, kv_head;
    int first;         ///< the first key, in the sequence
    int len;           ///< keys of the sequence
    std::int64_t row;  ///< row of `first` in the tensor
    std::int64_t at;   ///< index of these 64 keys in the partial sums of one split and head, over all sequences
};

template <class T, int kDim>
__device__ __forceinline__ void reduce_splits(const Launch& launch, const ReducedKeys& keys, int splits,
                                              const float* from, int blocks, const Rows& to, int columns,
                                              bool by_vectors, T (&tile)[kReduceKeys][kDim + 8]) {
    const int thread = static_cast<int>(threadIdx.x);
    const int heads_kv = launch.params.forward.heads_kv;
    float sum[kDim / 2] = {};
    for (int split = 0; split < splits; ++split) {
        const std::int64_t head = std::int64_t{split} * heads_kv + keys.kv_head;
        const auto* own = reinterpret_cast<const float4*>(from + (head * blocks + keys.at) * (kReduceKeys * kDim));
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
            const float4 four = own[128 * j + thread];
            sum[4 * j] += four.x;
            sum[4 * j + 1] += four.y;
            sum[4 * j + 2] += four.z;
            sum[4 * j + 3] += four.w;
        }
    }
    const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kDim / 2; i += 2) {
        *reinterpret_cast<std::uint32_t*>(&tile[row + 8 * row_of(i)][column_of(i) + 2 * (thread % 4)]) =
            ptx::pack<T>(sum[i], sum[i + 1]);
    }
    __syncthreads();
    T* out = reinterpret_cast<T*>(to.data) +
             (launch.params.forward.cu_seqlens_kv != nullptr ? 0 : keys.batch * to.batch) + keys.kv_head * to.head +
             keys.row * to.row;
    store_rows<kReduceThreads>(tile, to, out, min(kReduceKeys, keys.len - keys.first), columns, by_vectors);
}

template <class T, class Shape>
__global__ void __launch_bounds__(kReduceThreads) dkdv_reduce_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kPieces = kConfig.block_kv / kReduceKeys;
    using TileDk = T[kReduceKeys][kConfig.head_dim + 8];
    using TileDv = T[kReduceKeys][kConfig.head_dim_v + 8];
    __shared__ __align__(16) unsigned char memory[std::max(sizeof(TileDk), sizeof(TileDv))];
    const ForwardParams& p = launch.params.forward;
    const int count = (p.len_kv + kReduceKeys - 1) / kReduceKeys;
    const int number = static_cast<int>(blockIdx.x) / 2;
    const int head = number / count;
    ReducedKeys keys{};
    keys.first = number % count * kReduceKeys;
    keys.batch = head / p.heads_kv;
    keys.kv_head = head % p.heads_kv;
    const Sequence sequence = sequence_of(p, keys.batch);
    keys.len = sequence.len_kv;
    keys.row = sequence.first_kv + keys.first;
    ScheduleOf<kConfig> schedule;
    schedule.set_of(launch.schedule, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group);
    schedule.set_part(0, launch.part_queries);
    if (keys.first >= keys.len || !schedule.sums_in_workspace() || launch.workspace.state->cu_seqlens_decreased != 0)
        return;
    keys.at = first_block_kv(p, kConfig.block_kv, keys.batch, sequence.first_kv) * kPieces + keys.first / kReduceKeys;
    const int all = launch.blocks_kv * kPieces;
    if (blockIdx.x % 2 == 0) {
        if (launch.params.dk.data == nullptr) return;
        reduce_splits<T, kConfig.head_dim>(launch, keys, schedule.head_splits, launch.workspace.split_dk, all,
                                           launch.params.dk, p.head_dim, launch.gradients.vector_dk,
                                           reinterpret_cast<TileDk&>(memory));
    } else {
        if (launch.params.dv.data == nullptr) return;
        reduce_splits<T, kConfig.head_dim_v>(launch, keys, schedule.head_splits, launch.workspace.split_dv, all,
                                             launch.params.dv, p.head_dim_v, launch.gradients.vector_dv,
                                             reinterpret_cast<TileDv&>(memory));
    }
}

template <class T, class Shape>
cudaError_t launch_dkdv_reduce(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of backward_config.h");
    const ForwardParams& p = launch.params.forward;
    const std::int64_t count = (p.len_kv + kReduceKeys - 1) / kReduceKeys;
    return start(dkdv_reduce_kernel<T, Shape>, 2 * std::int64_t{p.batch} * p.heads_kv * count, kReduceThreads, 0,
                 launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
