// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 (Dao, 2023), algorithm 2: a thread block owns a block of keys and goes over the tiles of queries
// that see them; dK and dV stay in registers until the end, dQ is added up in the workspace. The order of these
// additions is fixed, and nobody waits for a block that has not begun (README).
#pragma once

#include <new>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/split_own.cuh"
#include "cuda/gradient/split_shared.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa2 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ gradient::Launch launch) {
    constexpr gradient::Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    // What all threads share is kept out of their registers.
    __shared__ alignas(gradient::KeyWork) char work_memory[sizeof(gradient::KeyWork)];
    gradient::KeyWork& work = *reinterpret_cast<gradient::KeyWork*>(work_memory);
    if (threadIdx.x == 0) gradient::take_ticket(work_memory, launch, kConfig.block_kv(), kConfig.query_tiles);
    __syncthreads();
    if (!work.exists()) return;

    const gradient::KeyThread<T, kConfig> thread{{launch, work, memory}, work};
    // What general scores go through is in the other step only.
    if constexpr (kConfig.own_sums) gradient::SplitOwn<T, kConfig>{{{{{{{thread}}}}}}}.run_block(work);
    else if constexpr (!kConfig.general) gradient::SplitShared<T, kConfig>{{{{{{{thread}}}}}}}.run_block(work);
    else gradient::KeyLoop<T, kConfig>{thread}.run_block(work);
}

template <class T, class Shape>
cudaError_t start_backward(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapes::kHas<Shape>, "not in the list of config.h");
    constexpr gradient::Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.thread_blocks();
    return start(backward_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::fa2
