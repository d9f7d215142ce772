// SPDX-License-Identifier: Apache-2.0
//
// dK and dV of which there are partial sums, of head splits or parts of the queries: adds up those of the splits in
// order, and rounds. The main kernel has added up the parts.
#pragma once

#include <algorithm>

#include "cuda/backward/ragged_keys.cuh"
#include "cuda/gradient/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

/// One tile of keys of one head, of dK or dV.
template <class T>
__device__ __forceinline__ void reduce_tile(const DkdvReduceLaunch& launch, unsigned number) {
    const ForwardParams& p = launch.params.forward;
    const bool dv = number % 2 != 0;
    const Rows& rows = dv ? launch.params.dv : launch.params.dk;
    if (rows.data == nullptr) return;
    const auto tiles = static_cast<unsigned>(launch.tiles);
    const unsigned pair = number / 2 / tiles;
    auto tile = static_cast<int>(number / 2 % tiles);
    std::int64_t batch = pair / static_cast<unsigned>(p.heads_kv);
    auto head = static_cast<int>(pair % static_cast<unsigned>(p.heads_kv));
    if (p.cu_seqlens_kv != nullptr) {
        const QueryTile of = ragged_key_tile(p, tile, DkdvReduceLaunch::kKeys);
        batch = of.batch, head = static_cast<int>(pair), tile = of.block;
    }
    const Sequence sequence = sequence_of(p, batch);
    const Band band = p.mask.bind(sequence.len_q, sequence.len_kv);
    const int heads = launch.splits_heads ? HeadSplit::heads_per_split(band, p.group) : p.group;
    const int splits = HeadSplit::num_splits(heads, p.group);
    if (splits == 1 && QueryParts(sequence.len_q, QueryParts::fitting(heads, launch.max_terms)).is_one()) return;

    const int dim = dv ? p.head_dim_v : p.head_dim;
    const Target target = target_of<T>(rows, head_offset(rows, batch, sequence.first_kv, head, sizeof(T)),
                                       sequence.len_kv, dim, dv ? launch.vector_dv : launch.vector_dk);
    const int chunks = launch.partial.dim / kChunk;
    const auto thread = static_cast<int>(threadIdx.x);
    const int column = thread % chunks * kChunk;
    if (column >= dim) return;
    const int first = tile * DkdvReduceLaunch::kKeys;
    if (first < 0) return;
    const int end = min(first + DkdvReduceLaunch::kKeys, sequence.len_kv);
    const std::int64_t first_row = p.cu_seqlens_kv != nullptr ? sequence.first_kv : batch * p.len_kv;
    const std::int64_t split_stride = launch.partial.row(false, 1, 0, 0) - launch.partial.row(false, 0, 0, 0);
    for (int key = first + thread / chunks; key < end; key += DkdvReduceLaunch::kThreads / chunks) {
        const float* from = launch.partial.row(dv, 0, head, first_row + key) + column;
        float4 low = {};
        float4 high = {};
#pragma unroll 4
        for (int split = 0; split < splits; ++split) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
            const float4 y = __ldcs(reinterpret_cast<const float4*>(from) + 1);
            low = {low.x + x.x, low.y + x.y, low.z + x.z, low.w + x.w};
            high = {high.x + y.x, high.y + y.y, high.z + y.z, high.w + y.w};
            from += split_stride;
        }
        const uint4 chunk = {ptx::pack<T>(low.x, low.y), ptx::pack<T>(low.z, low.w), ptx::pack<T>(high.x, high.y),
                             ptx::pack<T>(high.z, high.w)};
        if (target.vector) *reinterpret_cast<uint4*>(target.at(key, column)) = chunk;
        else target.store(key, column, chunk);
    }
}

/// Tiles of all heads, of dK and dV.
__host__ __device__ __forceinline__ std::int64_t reduce_tiles(const DkdvReduceLaunch& launch) {
    const ForwardParams& p = launch.params.forward;
    return 2 * (p.cu_seqlens_kv != nullptr ? 1 : p.batch) * p.heads_kv * launch.tiles;
}

template <class T>
__global__ void __launch_bounds__(DkdvReduceLaunch::kThreads)
    dkdv_reduce_kernel(const __grid_constant__ DkdvReduceLaunch launch) {
    const auto count = static_cast<unsigned>(reduce_tiles(launch));
#pragma unroll 1
    for (unsigned number = blockIdx.x; number < count; number += gridDim.x) reduce_tile<T>(launch, number);
}

/// In a ragged call few sequences may have partial sums, or none: it has no CTA for each tile.
template <class T>
cudaError_t start_dkdv_reduce(const DkdvReduceLaunch& launch, cudaStream_t stream) {
    constexpr std::int64_t kRaggedCtas = 1024;
    const std::int64_t tiles = reduce_tiles(launch);
    const std::int64_t blocks = launch.params.forward.cu_seqlens_kv != nullptr ? std::min(tiles, kRaggedCtas) : tiles;
    return start(dkdv_reduce_kernel<T>, blocks, DkdvReduceLaunch::kThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
