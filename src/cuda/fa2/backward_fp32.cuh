// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/main/mainloop_fp32.cuh"
#include "cuda/gradient/main/mainloop_parts.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa2 {

/// Algorithm 2 in fp32 by three bf16 parts.
template <class Shape>
__global__ void __launch_bounds__(gradient::PartsConfig::kThreads, 1)
    backward_parts_kernel(const __grid_constant__ gradient::Launch launch) {
    using Mainloop = gradient::MainloopParts<Shape::kConfig>;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(gradient::CtaWork) char work_memory[sizeof(gradient::CtaWork)];
    gradient::CtaWork& work = *reinterpret_cast<gradient::CtaWork*>(work_memory);
    if (threadIdx.x == 0) gradient::take_key_block(work_memory, launch, Shape::kConfig.block_kv);
    __syncthreads();
    if (!work.exists()) return;

    const Mainloop mainloop{launch, work, memory};
    typename Mainloop::Sums dv = {};
    typename Mainloop::Sums dk = {};
    mainloop.run(dv, dk);
    mainloop.store(dv, dk);
}

/// Algorithm 2 in fp32 by multiply-adds.
template <class Shape>
__global__ void __launch_bounds__(256, 1) backward_fp32_kernel(const __grid_constant__ gradient::Launch launch) {
    using Mainloop = gradient::MainloopFp32<Shape::kConfig>;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(gradient::CtaWork) char work_memory[sizeof(gradient::CtaWork)];
    gradient::CtaWork& work = *reinterpret_cast<gradient::CtaWork*>(work_memory);
    if (threadIdx.x == 0) gradient::take_key_block(work_memory, launch, Mainloop::Tile::kBlockKv);
    __syncthreads();
    if (!work.exists()) return;

    const ForwardParams& p = launch.params.forward;
    const Mainloop mainloop(launch, work, memory);
    mainloop.tile.load_keys(p, work.sequence, work.batch, work.kv_head, work.first_key);
    typename Mainloop::Sums dv = {};
    typename Mainloop::Sums dk = {};
    mainloop.run(dv, dk);
    mainloop.store(dv, launch.params.dv, p.head_dim_v, 1.0F);
    mainloop.store(dk, launch.params.dk, p.head_dim, p.scale);
}

template <class Shape>
cudaError_t start_backward_parts(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapesParts::kHas<Shape>);
    using Mainloop = gradient::MainloopParts<Shape::kConfig>;
    return start(backward_parts_kernel<Shape>, launch.ctas(), gradient::PartsConfig::kThreads, Mainloop::kSharedBytes,
                 launch, stream);
}

template <class Shape>
cudaError_t start_backward_fp32(const gradient::Launch& launch, cudaStream_t stream) {
    static_assert(BackwardShapesFp32::kHas<Shape>);
    using Mainloop = gradient::MainloopFp32<Shape::kConfig>;
    const std::int64_t blocks = launch.ctas();
    return start(backward_fp32_kernel<Shape>, blocks, Mainloop::Tile::kThreads, Mainloop::kSharedBytes, launch, stream);
}

}  // namespace tessera::cuda::fa2
