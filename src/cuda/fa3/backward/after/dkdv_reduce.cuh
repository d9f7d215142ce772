// SPDX-License-Identifier: Apache-2.0
//
// Runs after the main kernel, with head splits or parts of queries: sums dK and dV over the splits, in order, and
// rounds them. A CTA has 64 keys of dK or of dV at a time.
#pragma once

#include <algorithm>

#include "cuda/fa3/backward/common/key_piece.cuh"
#include "cuda/fa3/backward/common/store_gradient.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kReduceThreads = 128;
inline constexpr int kReduceKeys = kPieceKeys;  ///< keys of a CTA, which is one warpgroup
inline constexpr int kRaggedReduceCtas = 8;     ///< CTAs of a multiprocessor in a ragged call

/// The keys of a CTA.
struct ReducedKeys {
    int batch, kv_head;
    int first;         ///< the first key, in the sequence
    int len;           ///< keys of the sequence
    std::int64_t row;  ///< row of `first` in the tensor
    std::int64_t at;   ///< index of these 64 keys in the partial sums of one split and head, over all sequences
};

template <class T, int kDim>
using ReduceTile = T[kReduceKeys][kDim + 8];

template <class T, int kDim>
__device__ __forceinline__ void reduce_splits(const Launch& launch, const ReducedKeys& keys, int splits,
                                              const float* from, int blocks, const Rows& to, int columns,
                                              bool by_vectors, ReduceTile<T, kDim>& tile) {
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

/// dK (`number` even) or dV of 64 keys.
template <class T, Config kConfig>
__device__ __forceinline__ void reduce_piece(const Launch& launch, int number, unsigned char* memory) {
    constexpr int kPieces = kConfig.block_kv / kReduceKeys;
    const ForwardParams& p = launch.params.forward;
    const KeyPiece piece = key_piece_at<kConfig>(launch, number / 2);
    const Sequence sequence = sequence_of(p, piece.batch);
    ReducedKeys keys{};
    keys.first = piece.first;
    keys.batch = piece.batch;
    keys.kv_head = piece.kv_head;
    keys.len = sequence.len_kv;
    keys.row = sequence.first_kv + keys.first;
    ScheduleOf<kConfig> schedule;
    schedule.set_of(launch.schedule, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group);
    schedule.set_part(0, launch.part_queries);
    if (keys.first < 0 || keys.first >= keys.len || !schedule.sums_in_workspace()) return;
    keys.at = first_block_kv(p, kConfig.block_kv, keys.batch, sequence.first_kv) * kPieces + keys.first / kReduceKeys;
    const int all = launch.blocks_kv * kPieces;
    if (number % 2 == 0) {
        if (launch.params.dk.data == nullptr) return;
        reduce_splits<T, kConfig.head_dim>(launch, keys, schedule.head_splits, launch.workspace.split_dk, all,
                                           launch.params.dk, p.head_dim, launch.gradients.vector_dk,
                                           *reinterpret_cast<ReduceTile<T, kConfig.head_dim>*>(memory));
    } else {
        if (launch.params.dv.data == nullptr) return;
        reduce_splits<T, kConfig.head_dim_v>(launch, keys, schedule.head_splits, launch.workspace.split_dv, all,
                                             launch.params.dv, p.head_dim_v, launch.gradients.vector_dv,
                                             *reinterpret_cast<ReduceTile<T, kConfig.head_dim_v>*>(memory));
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(kReduceThreads) dkdv_reduce_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    __shared__ __align__(16) unsigned char
        memory[std::max(sizeof(ReduceTile<T, kConfig.head_dim>), sizeof(ReduceTile<T, kConfig.head_dim_v>))];
    if (launch.workspace.state->cu_seqlens_decreased != 0) return;
    const auto count = static_cast<int>(2 * key_piece_count<kConfig>(launch));
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x); number < count; number += static_cast<int>(gridDim.x)) {
        reduce_piece<T, kConfig>(launch, number, memory);
        __syncthreads();  // the next piece takes the memory
    }
}

/// In a ragged call few sequences may be split, or none: it has no CTA for each piece, since most would find no work.
template <class T, class Shape>
cudaError_t launch_dkdv_reduce(const Launch& launch, cudaStream_t stream) {
    static_assert(ReduceShapes::kHas<Shape>, "not in that list of backward_config.h");
    std::int64_t ctas = 2 * key_piece_count<Shape::kConfig>(launch);
    if (launch.params.forward.cu_seqlens_kv != nullptr) {
        ctas = std::min(ctas, std::int64_t{launch.multiprocessors} * kRaggedReduceCtas);
    }
    return start(dkdv_reduce_kernel<T, Shape>, ctas, kReduceThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
