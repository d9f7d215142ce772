// SPDX-License-Identifier: Apache-2.0
//
// The RMS norm of the rows of x: x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once to bf16. Every CTA computes
// all rows for itself. The order of the sums depends on the number of columns alone.
#pragma once

#include "cuda/block/shared.cuh"

namespace tessera::cuda::block {

/// Eight bf16 numbers of a chunk of 16 bytes.
struct Eight {
    float x[8];

    __device__ __forceinline__ explicit Eight(const uint4& chunk) {
        const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = ptx::unpack<Element>(words[i / 2], i % 2);
    }
};

/// The weights of a chunk.
__device__ __forceinline__ void read_weights(float (&weights)[8], const Launch& launch, int chunk) {
    if (launch.norm_fp32) {
        const auto* from = reinterpret_cast<const float4*>(launch.norm + chunk * 32);
        const float4 low = from[0], high = from[1];
        const float both[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) weights[i] = both[i];
    } else {
        const Eight eight(*reinterpret_cast<const uint4*>(launch.norm + chunk * 16));
#pragma unroll
        for (int i = 0; i < 8; ++i) weights[i] = eight.x[i];
    }
}

/// Copies the rows into shared memory and normalises them there. All consumer warps call it, and may read the rows
/// afterwards.
template <class Shape>
__device__ __forceinline__ void norm_rows(const Block<Shape>& block) {
    constexpr int kThreads = 32 * Shape::kConfig.warps, kMost = Config::kMostBatch;
    const Launch& launch = block.launch;
    const int columns = launch.qkv.columns, chunks = columns / 8, bytes = row_bytes(columns);
    const int thread = 32 * block.warp + block.lane;
    float weights[8] = {};
    if (thread < chunks) read_weights(weights, launch, thread);  // the first ones, before the wait for x
    float sums[kMost] = {};
#pragma unroll 1
    for (int c = thread; c < chunks; c += kThreads) {
        uint4 read[kMost];
#pragma unroll
        for (int row = 0; row < kMost; ++row)
            if (row < launch.batch)
                read[row] = *reinterpret_cast<const uint4*>(launch.x.data + row * launch.x.row_bytes + c * 16);
#pragma unroll
        for (int row = 0; row < kMost; ++row) {
            if (row >= launch.batch) continue;
            *reinterpret_cast<uint4*>(block.rows() + row * bytes + c * 16) = read[row];
            const Eight eight(read[row]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[row] = __fmaf_rn(eight.x[i], eight.x[i], sums[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < kMost; ++row) {
        if (row >= launch.batch) continue;
        const float sum = warp_sum(sums[row]);
        if (block.lane == 0) block.shared.squares[row][block.warp] = sum;
    }
    block.sync_consumers();
    if (block.warp < launch.batch) {  // the factor of a row for each warp
        float sum = block.shared.squares[block.warp][0];
#pragma unroll
        for (int w = 1; w < Shape::kConfig.warps; ++w) sum = __fadd_rn(sum, block.shared.squares[block.warp][w]);
        const float mean = __fdiv_rn(sum, static_cast<float>(columns));
        if (block.lane == 0) block.shared.factors[block.warp] = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, launch.norm_eps)));
    }
    block.sync_consumers();
#pragma unroll 1
    for (int c = thread; c < chunks; c += kThreads) {
        if (c != thread) read_weights(weights, launch, c);
#pragma unroll 1
        for (int row = 0; row < launch.batch; ++row) {
            const float factor = block.shared.factors[row];
            auto& chunk = *reinterpret_cast<uint4*>(block.rows() + row * bytes + c * 16);
            const Eight eight(chunk);
            std::uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = ptx::pack<Element>(__fmul_rn(__fmul_rn(eight.x[2 * i], factor), weights[2 * i]),
                                              __fmul_rn(__fmul_rn(eight.x[2 * i + 1], factor), weights[2 * i + 1]));
            chunk = {words[0], words[1], words[2], words[3]};
        }
    }
    block.sync_consumers();
}

}  // namespace tessera::cuda::block
