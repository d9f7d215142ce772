// SPDX-License-Identifier: Apache-2.0
//
// dQ in the output's format: the sum of both accumulators in the workspace, times the scale, rounded.
#pragma once

#include "cuda/gradient/workspace.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

template <class T, int kHeadDim>
__global__ void __launch_bounds__(DqTile<kHeadDim>::kThreads) dq_kernel(const __grid_constant__ Launch launch) {
    using Tile = DqTile<kHeadDim>;
    __shared__ __align__(128) char rounded[kBlockQ * kHeadDim * 2];
    const ForwardParams& p = launch.params.forward;
    const auto [batch, head, tile] = head_tile_at(p, blockIdx.x, kBlockQ);
    const Sequence sequence = sequence_of(p, batch);
    if (tile < 0 || tile * kBlockQ >= sequence.len_q) return;

    const std::int64_t index = first_tile(launch, sequence, batch, head) + tile;
    const auto thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int first_row = Tile::first_row(thread / 32) + lane / 4;
    const float scale = p.scale / ds_scale<T>(launch, batch, head);
    bool written[2];
#pragma unroll
    for (int a = 0; a < 2; ++a) written[a] = launch.dq_semaphores[a * launch.all_tiles() + index] != 0;
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kColumnTiles; ++n) {
            float4 x[2] = {};
#pragma unroll
            for (int a = 0; a < 2; ++a) {
                const float* from = launch.dq + (a * launch.all_tiles() + index) * Tile::kFloats;
                if (written[a]) x[a] = *reinterpret_cast<const float4*>(from + Tile::offset(m, n, thread));
            }
            const int chunk = Tile::first_chunk(thread / 32) + n;
            const int row = first_row + 16 * m;
            // fmaf(x, f, 0) turns -0 into +0, so the sign cannot reveal how many masked products were added.
            const std::uint32_t upper =
                ptx::pack<T>(fmaf(x[0].x + x[1].x, scale, 0.0F), fmaf(x[0].y + x[1].y, scale, 0.0F));
            const std::uint32_t lower =
                ptx::pack<T>(fmaf(x[0].z + x[1].z, scale, 0.0F), fmaf(x[0].w + x[1].w, scale, 0.0F));
            *reinterpret_cast<std::uint32_t*>(rounded + chunk_offset<kHeadDim>(row, chunk) + lane % 4 * 4) = upper;
            *reinterpret_cast<std::uint32_t*>(rounded + chunk_offset<kHeadDim>(row + 8, chunk) + lane % 4 * 4) = lower;
        }
    }
    __syncthreads();
    const Rows& dq = launch.params.dq;
    const std::int64_t offset = head_offset(dq, batch, sequence.first_q, head, sizeof(T));
    const Target target = target_of<T>(dq, offset, sequence.len_q, p.head_dim, launch.vector_dq);
    constexpr int kRowsOfWarp = kBlockQ / (Tile::kThreads / 32);
    store<kHeadDim, kRowsOfWarp>(rounded, target, tile * kBlockQ, thread / 32 * kRowsOfWarp, lane);
}

template <class T, int kHeadDim>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream) {
    if (launch.params.dq.data == nullptr) return cudaSuccess;
    const std::int64_t blocks = tiles_of_heads(launch.params.forward, kBlockQ);
    return start(dq_kernel<T, kHeadDim>, blocks, DqTile<kHeadDim>::kThreads, 0, launch, stream);
}

/// The fp32 form. An accumulator lies in the workspace as [queries][columns].
template <int kHeadDim>
__global__ void __launch_bounds__(256) dq_fp32_kernel(const __grid_constant__ Launch launch) {
    const ForwardParams& p = launch.params.forward;
    const auto [batch, head, tile] = head_tile_at(p, blockIdx.x, kBlockQ);
    const Sequence sequence = sequence_of(p, batch);
    if (tile < 0 || tile * kBlockQ >= sequence.len_q) return;
    const std::int64_t index = first_tile(launch, sequence, batch, head) + tile;
    const Rows& dq = launch.params.dq;
    auto* const to = reinterpret_cast<float*>(dq.data + head_offset(dq, batch, sequence.first_q, head, 4));
    for (int i = static_cast<int>(threadIdx.x); i < kBlockQ * p.head_dim; i += 256) {
        const int row = i / p.head_dim;
        const int column = i % p.head_dim;
        const int query = tile * kBlockQ + row;
        if (query >= sequence.len_q) return;
        float x[2] = {0, 0};
#pragma unroll
        for (int a = 0; a < 2; ++a) {
            const std::int64_t accumulator = a * launch.all_tiles() + index;
            if (launch.dq_semaphores[accumulator] == 0) continue;
            x[a] = launch.dq[(accumulator * kBlockQ + row) * kHeadDim + column];
        }
        to[query * dq.row + column * dq.column] = fmaf(x[0] + x[1], p.scale, 0.0F);
    }
}

template <int kHeadDim>
cudaError_t start_dq_fp32(const Launch& launch, cudaStream_t stream) {
    if (launch.params.dq.data == nullptr) return cudaSuccess;
    const std::int64_t blocks = tiles_of_heads(launch.params.forward, kBlockQ);
    return start(dq_fp32_kernel<kHeadDim>, blocks, 256, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
