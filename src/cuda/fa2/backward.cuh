// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 (Dao, 2023), algorithm 2: a CTA owns a key block and goes over the query tiles that see it. dK and
// dV stay in registers until the end, dQ is added up in the workspace, in a fixed order
// (cuda/gradient/host/dq_order.hpp).
#pragma once

#include <new>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/main/mainloop_split_columns.cuh"
#include "cuda/gradient/main/mainloop_split_queries.cuh"
#include "cuda/gradient/main/mainloop_warp_pairs.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa2 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ gradient::Launch launch) {
    constexpr gradient::Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    // The work struct is in shared memory, to save registers.
    __shared__ alignas(gradient::CtaWork) char work_memory[sizeof(gradient::CtaWork)];
    gradient::CtaWork& work = *reinterpret_cast<gradient::CtaWork*>(work_memory);
    if (threadIdx.x == 0) gradient::take_key_block(work_memory, launch, kConfig.block_kv(), kConfig.query_tiles);
    __syncthreads();
    if (!work.exists()) return;

    const gradient::CtaTiles<T, kConfig> tiles{launch, work, memory};
    if constexpr (kConfig.split_queries) gradient::MainloopSplitQueries<T, kConfig>{tiles}.run_block(work);
    else if constexpr (!kConfig.general) gradient::MainloopSplitColumns<T, kConfig>{tiles}.run_block(work);
    else gradient::MainloopWarpPairs<T, kConfig>{tiles}.run_block(work);
}

template <class T, class Shape>
cudaError_t start_backward(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapes::kHas<Shape>, "not in the list of config.h");
    constexpr gradient::Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.ctas();
    return start(backward_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::fa2
