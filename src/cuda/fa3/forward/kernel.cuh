// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3 forward (Shah et al. 2024, Algorithm 1 and section 3). Q tiles are the outer loop and K/V blocks the
// inner loop, as in FlashAttention-2. Hopper adds:
//   - warp specialization: a producer warp fills shared memory by TMA, two or three consumer warpgroups compute;
//   - ping-pong scheduling (section 3.1): of two consumers, one exponentiates beside the other's GEMMs;
//   - within a warpgroup, S of a block runs beside P V of the previous block (section 3.2), and no GEMM of its own
//     runs under its exponentials;
//   - a persistent grid: the blocks of all tiles of a thread block form one stream, and a tile's first S runs beside
//     the last P V of the previous tile.
#pragma once

#include "cuda/fa3/forward/mainloop.cuh"
#include "cuda/fa3/forward/producer.cuh"
#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.ctas)
    forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    static_assert(kConfig.registers_fit() && kConfig.o_fits());
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    if (threadIdx.x == 0) {
        for (const CUtensorMap* map : {&launch.q, &launch.k, &launch.v, &launch.o}) ptx::prefetch_tensor_map(*map);
        shared.init_barriers();
    }
    __syncthreads();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup == 0) {
        const int thread = static_cast<int>(threadIdx.x);
        ptx::setmaxnreg_dec<kConfig.producer_registers()>();
        if (thread < kConfig.producer_threads()) Producer<kConfig>{launch, shared}.run();
        else if (thread >= 32) sanitize_v<T, kConfig>(shared, thread - 32);
    } else {
        ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
        Consumer<T, kConfig>{launch, shared, warpgroup - 1}.run();
    }
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of forward_config.h");
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(Shape::kConfig.ctas * (kBytes + 1024) <= 228 * 1024);
    const Start when = launch.queue == nullptr ? Start::in_order : Start::programmatic;
    return start(forward_kernel<T, Shape>, blocks, Shape::kConfig.threads(), kBytes, launch, stream, when);
}

}  // namespace tessera::cuda::fa3
