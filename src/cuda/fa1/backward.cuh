// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention (Dao et al., 2022), algorithm 4: a thread block owns a (batch, kv head) and goes over its blocks of
// keys; inside, over the tiles of queries that see them. dK and dV stay in registers, dQ is read from and written to
// memory in each step. The step itself is that of fa2 (cuda/gradient).
#pragma once

#include <new>

#include "cuda/fa1/host/config.h"
#include "cuda/gradient/key_loop.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa1 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ gradient::Launch launch) {
    constexpr gradient::Config kConfig = Shape::kConfig;
    using Loop = gradient::KeyLoop<T, kConfig>;
    extern __shared__ __align__(128) char memory[];
    // What all threads share is kept out of their registers.
    __shared__ alignas(gradient::KeyWork) char work_memory[sizeof(gradient::KeyWork)];
    gradient::KeyWork& work = *reinterpret_cast<gradient::KeyWork*>(work_memory);
    if (threadIdx.x == 0) {
        new (work_memory) gradient::KeyWork(launch, static_cast<int>(blockIdx.x));
        work.waits = false;
    }
    const Loop loop{{{launch, work, memory}, work}};
#pragma unroll 1
    for (int number = launch.key_blocks - 1; number >= 0; --number) {  // the order in which dQ is added up
        __syncthreads();
        if (threadIdx.x == 0) work.set_block(number, kConfig.block_kv());
        __syncthreads();
        if (work.exists()) loop.run_block(work);
    }
}

template <class T, class Shape>
cudaError_t start_backward(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapes::kHas<Shape>, "not in the list of config.h");
    constexpr gradient::Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.params.forward.batch * launch.params.forward.heads_kv;
    return start(backward_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::fa1
