// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias: dS before rounding, summed over the dimensions in which the bias has one element. A CTA owns
// a tile of the bias and goes over all score tiles that it was added to, in a fixed order.
#pragma once

#include "cuda/gradient/after/bias_task.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda::standard {

/// The elements of a thread, whose rows and columns are kStride apart.
struct BiasElements {
    static constexpr int kStride = 16;
    static constexpr int kEach = kBiasTile / kStride;
    static constexpr int kPitch = kBiasTile + 1;  // floats from one row to the next in shared memory
    float total[kEach][kEach] = {};               // of the earlier parts
    float sums[kEach][kEach] = {};
    int tiles = 0;  // in sums

    __device__ static __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kStride; }
    __device__ static __forceinline__ int column() { return static_cast<int>(threadIdx.x) % kStride; }

    __device__ __forceinline__ void add(const Head& head, std::int64_t pitch, const Band32& band, int first_query,
                                        int first_key) {
        if (tiles++ == gradient::kTilesOfBiasPart) {
            gradient::move_to_total(total, sums);
            tiles = 1;
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int query = first_query + row() + kStride * i;
            if (query >= head.sequence.len_q) return;
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                const int key = first_key + column() + kStride * j;
                if (band.sees(query, key)) sums[i][j] += head.scores[query * pitch + key];
            }
        }
    }
};

template <class T>
__global__ void __launch_bounds__(kBiasThreads)
    bias_gradient_kernel(const __grid_constant__ BiasGradientLaunch launch) {
    __shared__ float shared[kBiasTile * BiasElements::kPitch];
    const ForwardParams& p = launch.forward.params;
    const int q_count = (p.len_q + kBiasTile - 1) / kBiasTile;
    const int key_count = (p.len_kv + kBiasTile - 1) / kBiasTile;
    const gradient::BiasTask task(p, launch.dbias, blockIdx.x, q_count, key_count);
    BiasElements elements;
    for (int batch = task.batches.begin; batch < task.batches.end; ++batch) {
        for (int of_head = task.heads.begin; of_head < task.heads.end; ++of_head) {
            const Head head(launch.forward, std::int64_t{batch} * p.heads_q + of_head);
            const Band32 band(head.band);
            for (int q = task.q_tiles.begin; q < task.q_tiles.end; ++q) {
                for (int k = task.key_tiles.begin; k < task.key_tiles.end; ++k) {
                    elements.add(head, launch.forward.pitch, band, q * kBiasTile, k * kBiasTile);
                }
            }
        }
    }
    gradient::move_to_total(elements.total, elements.sums);
#pragma unroll
    for (int i = 0; i < BiasElements::kEach; ++i) {
#pragma unroll
        for (int j = 0; j < BiasElements::kEach; ++j) {
            shared[(elements.row() + elements.kStride * i) * elements.kPitch + elements.column() +
                   elements.kStride * j] = elements.total[i][j];
        }
    }
    __syncthreads();
    task.store<T, kBiasTile, kBiasTile>(p, launch.dbias, shared, BiasElements::kPitch);
}

template <class T>
cudaError_t start_bias_gradient(const BiasGradientLaunch& launch, cudaStream_t stream) {
    const ForwardParams& p = launch.forward.params;
    const std::int64_t blocks = gradient::bias_tasks(p, launch.dbias, (p.len_q + kBiasTile - 1) / kBiasTile,
                                                     (p.len_kv + kBiasTile - 1) / kBiasTile);
    if (blocks == 0) return cudaSuccess;
    return start(bias_gradient_kernel<T>, blocks, kBiasThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::standard
