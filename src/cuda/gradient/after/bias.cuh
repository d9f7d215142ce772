// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias: dS, summed over the dimensions in which the bias has one element. A CTA owns a tile of the
// bias and goes over all score tiles that it was added to, in a fixed order; no two CTAs share a sum.
#pragma once

#include <new>

#include "cuda/gradient/after/bias_task.cuh"
#include "cuda/gradient/before/query_tile.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::gradient {

template <class T, RowConfig kConfig>
struct BiasSums {
    using Gemms = RowGemms<T, kConfig>;
    static constexpr int kTiles = Gemms::kTiles;
    static constexpr int kPitch = kConfig.block_kv + 1;  // floats from one row to the next in shared memory
    float total[kTiles][4] = {};                         // of the earlier parts
    float sums[kTiles][4] = {};                          // [8 keys][4], 16 queries a warp
    int tiles = 0;                                       // in sums

    /// Adds dS of one score tile. `dp` includes the dropout.
    __device__ __forceinline__ void add(const Gemms& gemms, const typename Gemms::Scores& s,
                                        const typename Gemms::Scores& dp, int key_tile) {
        if (tiles++ == kTilesOfBiasPart) {
            move_to_total(total, sums);
            tiles = 1;
        }
        const Launch& launch = gemms.launch;
        const RowWork& work = gemms.work;
        const std::int64_t first = first_tile(launch, work.sequence, work.batch, work.head);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = gemms.query() + 8 * r;
            if (query >= work.sequence.len_q) continue;
            const RowTile& rows = launch.rows[first + query / kBlockQ];
            const int row = query % kBlockQ;
            const float offset = rows.offset[row];
            const float norm = rows.norm[row];
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!work.band.sees(query, gemms.key(key_tile) + 8 * j + e)) continue;
                    const float score = s[0][j][2 * r + e];
                    const float p = norm == 0.0F ? ptx::exp2_approx(fmaf(score, kLog2E, -offset))
                                                 : ptx::exp2_approx(__fadd_rn(score, -rows.max[row]) * kLog2E) * norm;
                    sums[j][2 * r + e] += p * (dp[0][j][2 * r + e] - rows.delta[row]);
                }
            }
        }
    }

    /// Writes the CTA's elements. `shared`: block_q * kPitch floats that no thread uses.
    __device__ __forceinline__ void store(const Launch& launch, const BiasTask& task, float* shared) const {
        const int lane = Gemms::lane();
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = Gemms::first_row() + lane / 4 + e / 2 * 8;
                shared[row * kPitch + 8 * j + lane % 4 * 2 + e % 2] = total[j][e];
            }
        }
        __syncthreads();
        task.store<T, kConfig.block_q(), kConfig.block_kv>(launch.params.forward, launch.params.dbias, shared, kPitch);
    }
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    bias_kernel(const __grid_constant__ Launch launch) {
    constexpr RowConfig kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(RowWork) char work_memory[sizeof(RowWork)];
    const RowWork& work = *reinterpret_cast<const RowWork*>(work_memory);
    const ForwardParams& p = launch.params.forward;
    const int q_count = (p.len_q + kConfig.block_q() - 1) / kConfig.block_q();
    const int key_count = (p.len_kv + kConfig.block_kv - 1) / kConfig.block_kv;
    const BiasTask task(p, launch.params.dbias, blockIdx.x, q_count, key_count);
    const RowGemms<T, kConfig> gemms{launch, work, memory};
    BiasSums<T, kConfig> sums;
    for (int batch = task.batches.begin; batch < task.batches.end; ++batch) {
        for (int head = task.heads.begin; head < task.heads.end; ++head) {
            for (int q_tile = task.q_tiles.begin; q_tile < task.q_tiles.end; ++q_tile) {
                __syncthreads();
                if (threadIdx.x == 0) {
                    new (work_memory)
                        RowWork(p, batch, head, q_tile * kConfig.block_q(), kConfig.block_q(), kConfig.block_kv);
                }
                __syncthreads();
                if (!work.exists()) break;
                gemms.for_each_tile(task.key_tiles.begin, task.key_tiles.end,
                                    [&](auto& s, const auto& dp, int tile) { sums.add(gemms, s, dp, tile); });
            }
        }
    }
    move_to_total(sums.total, sums.sums);
    __syncthreads();
    sums.store(launch, task, reinterpret_cast<float*>(memory));
}

template <class T, class Shape>
cudaError_t start_bias(const Launch& launch, cudaStream_t stream) {
    constexpr RowConfig kConfig = Shape::kConfig;
    static_assert(kConfig.general, "a bias makes a shape general");
    static_assert(kConfig.block_q() * BiasSums<T, kConfig>::kPitch * 4 <= kConfig.shared_bytes());
    const ForwardParams& p = launch.params.forward;
    const std::int64_t blocks =
        bias_tasks(launch.params.forward, launch.params.dbias, (p.len_q + kConfig.block_q() - 1) / kConfig.block_q(),
                   (p.len_kv + kConfig.block_kv - 1) / kConfig.block_kv);
    if (blocks == 0) return cudaSuccess;
    return start(bias_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::gradient
