// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3 backward: K/V blocks outer, in shared memory; blocks of queries inner.
#pragma once

#include "cuda/fa3/backward/epilogue.cuh"
#include "cuda/fa3/backward/producer.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3::backward {

template <class OfConsumer, bool kFinishes = false, Config kConfig>
__device__ __forceinline__ void run(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    OfConsumer consumer{{launch, shared, warpgroup}};
    if constexpr (requires { consumer.template run<kFinishes>(); }) consumer.template run<kFinishes>();
    else consumer.run();
    store_gradients(consumer);
}

/// Of consumers that make dQ.
template <class OfConsumer, Config kConfig>
__device__ __forceinline__ void run_or_finish(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    if constexpr (kConfig.may_finish()) {
        if (shared.block.finishes) return run<OfConsumer, true>(launch, shared, warpgroup);
    }
    run<OfConsumer>(launch, shared, warpgroup);
}

/// What a consumer warpgroup does.
template <class T, Config kConfig>
__device__ __forceinline__ void consume(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    if constexpr (kConfig.dq_apart()) {
        if (warpgroup == Config::kConsumers) {
            ptx::give_registers<Config::kDqRegisters>();
            return run_or_finish<QueriesConsumer<T, kConfig>>(launch, shared, 0);
        }
    }
    ptx::take_registers<kConfig.consumer_registers()>();
    if constexpr (kConfig.dq_apart()) run<KeysConsumer<T, kConfig>>(launch, shared, warpgroup);
    else if constexpr (!kConfig.roles()) run_or_finish<Consumer<T, kConfig>>(launch, shared, warpgroup);
    else if (warpgroup == 0) run<WeightsConsumer<T, kConfig>>(launch, shared, 0);
    else run<ScoresConsumer<T, kConfig>>(launch, shared, 1);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) backward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    if (threadIdx.x == 32) {
        for (const CUtensorMap* map : {&launch.k, &launch.v, &launch.q, &launch.d_o}) ptx::prefetch_tensor_map(*map);
    }
    if (threadIdx.x == 0) {
        shared.init_barriers();
        shared.lost = 0;
        shared.broken = launch.workspace.start->broken;
        // Blocks that started earlier come earlier in the order: nobody waits for one that has not started.
        shared.block.set(launch, atomicAdd(&launch.workspace.start->next_block, 1));
        if constexpr (kHeld<T>) {
            shared.unit =
                gradient_unit<T>(launch, shared.block.batch, shared.block.kv_head, shared.block.share) / kWeightUnit<T>;
        }
    }
    __syncthreads();
    if (!shared.block.exists() || shared.broken != 0) return;
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (warpgroup == 0) {
        ptx::give_registers<Config::kProducerRegisters>();
        if constexpr (kConfig.may_finish()) {
            if (shared.block.finishes) return produce<kConfig, Order::falling, true>(launch, shared);
        }
        if (shared.block.blocks.rising) produce<kConfig, Order::rising>(launch, shared);
        else if (shared.block.blocks.parted) produce<kConfig, Order::in_parts>(launch, shared);
        else produce<kConfig, Order::falling>(launch, shared);
    } else {
        consume<T>(launch, shared, warpgroup - 1);
    }
}

template <class T, class Shape>
cudaError_t start_backward(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    const std::int64_t blocks = std::int64_t{launch.heads} * launch.parts * launch.part_kv;
    return start(backward_kernel<T, Shape>, blocks, Shape::kConfig.threads(), kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
