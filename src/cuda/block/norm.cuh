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

/// The norms of the rows in shared memory, and their weights. By all computing warps, which may read the rows
/// afterwards.
template <class Shape>
__device__ __forceinline__ void norm_rows(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const int columns = launch.qkv.columns, chunks = columns / 8, bytes = row_bytes(columns);
    const int thread = 32 * block.warp + block.lane;
    for (int row = 0; row < launch.batch; ++row) {
        const char* from = launch.x.data + row * launch.x.row_bytes;
        float sum = 0;
#pragma unroll 4
        for (int c = thread; c < chunks; c += 32 * Config::kWarps) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(from + c * 16);
            *reinterpret_cast<uint4*>(block.rows() + row * bytes + c * 16) = chunk;
            const Eight eight(chunk);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = __fmaf_rn(eight.x[i], eight.x[i], sum);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, step));
        if (block.lane == 0) block.shared.squares[row][block.warp] = sum;
    }
    block.sync_computing();
#pragma unroll 1
    for (int c = thread; c < chunks; c += 32 * Config::kWarps) {
        float weight[8];
        if (launch.norm_fp32) {
            const auto* from = reinterpret_cast<const float4*>(launch.norm + c * 32);
            const float4 low = from[0], high = from[1];
            const float both[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) weight[i] = both[i];
        } else {
            const Eight eight(*reinterpret_cast<const uint4*>(launch.norm + c * 16));
#pragma unroll
            for (int i = 0; i < 8; ++i) weight[i] = eight.x[i];
        }
        for (int row = 0; row < launch.batch; ++row) {
            float sum = block.shared.squares[row][0];
#pragma unroll
            for (int w = 1; w < Config::kWarps; ++w) sum = __fadd_rn(sum, block.shared.squares[row][w]);
            const float mean = __fdiv_rn(sum, static_cast<float>(columns));
            const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, launch.norm_eps)));
            auto& place = *reinterpret_cast<uint4*>(block.rows() + row * bytes + c * 16);
            const Eight eight(place);
            std::uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = ptx::pack<Element>(__fmul_rn(__fmul_rn(eight.x[2 * i], factor), weight[2 * i]),
                                              __fmul_rn(__fmul_rn(eight.x[2 * i + 1], factor), weight[2 * i + 1]));
            place = {words[0], words[1], words[2], words[3]};
        }
    }
    block.sync_computing();
}

}  // namespace tessera::cuda::block
