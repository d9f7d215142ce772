// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/key_loop_fp32.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa2 {

/// The same algorithm in fp32.
template <class Shape>
__global__ void __launch_bounds__(256, 1) backward_fp32_kernel(const __grid_constant__ gradient::Launch launch) {
    using Loop = gradient::KeyLoopFp32<Shape::kConfig>;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(gradient::KeyWork) char work_memory[sizeof(gradient::KeyWork)];
    gradient::KeyWork& work = *reinterpret_cast<gradient::KeyWork*>(work_memory);
    if (threadIdx.x == 0) gradient::take_ticket(work_memory, launch, Loop::Tile::kBlockKv);
    __syncthreads();
    if (!work.exists()) return;

    const ForwardParams& p = launch.params.forward;
    const Loop loop(launch, work, memory);
    loop.tile.load_keys(p, work.sequence, work.batch, work.kv_head, work.first_key);
    typename Loop::Sums dv = {};
    typename Loop::Sums dk = {};
    loop.run(dv, dk);
    loop.store(dv, launch.params.dv, p.head_dim_v, 1.0F);
    loop.store(dk, launch.params.dk, p.head_dim, p.scale);
}

template <class Shape>
cudaError_t start_backward_fp32(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapesFp32::kHas<Shape>);
    using Loop = gradient::KeyLoopFp32<Shape::kConfig>;
    const std::int64_t blocks = launch.thread_blocks();
    return start(backward_fp32_kernel<Shape>, blocks, Loop::Tile::kThreads, Loop::kSharedBytes, launch, stream);
}

}  // namespace tessera::cuda::fa2
