// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention (Dao et al., 2022), algorithm 4: a CTA owns a (batch, kv head). It goes over the key blocks, and for
// each block over the query tiles that see it. dK and dV stay in registers, dQ is read from and written to memory in
// each step. The mainloop is one of fa2's (cuda/gradient).
#pragma once

#include <new>

#include "cuda/fa1/host/config.h"
#include "cuda/gradient/main/mainloop_warp_pairs.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa1 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ gradient::Launch launch) {
    constexpr gradient::Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    // The work struct is in shared memory, to save registers.
    __shared__ alignas(gradient::CtaWork) char work_memory[sizeof(gradient::CtaWork)];
    gradient::CtaWork& work = *reinterpret_cast<gradient::CtaWork*>(work_memory);
    if (threadIdx.x == 0) {
        new (work_memory) gradient::CtaWork(launch, static_cast<int>(blockIdx.x));
        work.waits = false;
    }
    const gradient::MainloopWarpPairs<T, kConfig> mainloop{{launch, work, memory}};
    __syncthreads();
    const int blocks = (work.sequence.len_kv + kConfig.block_kv() - 1) / kConfig.block_kv();
#pragma unroll 1
    for (int number = blocks - 1; number >= 0; --number) {  // the order in which dQ is added up
        __syncthreads();
        if (threadIdx.x == 0) work.set_block(number, kConfig.block_kv());
        __syncthreads();
        if (work.exists()) mainloop.run_block(work);
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
