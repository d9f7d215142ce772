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

/// What a consumer warpgroup that has keys does.
template <class T, Config kConfig>
__device__ __forceinline__ void consume(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    if constexpr (kConfig.dq_apart()) run<KeysConsumer<T, kConfig>>(launch, shared, warpgroup);
    else if constexpr (!kConfig.roles()) run_or_finish<Consumer<T, kConfig>>(launch, shared, warpgroup);
    else if (warpgroup == 0) run<WeightsConsumer<T, kConfig>>(launch, shared, 0);
    else run<ScoresConsumer<T, kConfig>>(launch, shared, 1);
}

/// One thread: which keys the thread block works on; the first copies are on their way as soon as that is known.
template <class T, Config kConfig>
__device__ __forceinline__ void begin(const Launch& launch, Shared<kConfig>& shared, unsigned number, int broken) {
    shared.init_barriers();
    shared.lost = 0;
    KeyBlock<kConfig>& block = shared.block;
    block.set_place(launch, number);
    shared.broken = broken;
    if (broken == 0 && block.exists()) {
        if (block.blocks.rising) load_first<kConfig, true>(launch, shared);
        else load_first<kConfig, false>(launch, shared);
    }
    block.set_order(launch);
    if constexpr (kHeld<T>) {
        shared.unit = gradient_unit<T>(launch, block.batch, block.kv_head, block.share) / kWeightUnit<T>;
    }
}

/// All threads: waits for begin(). Is there anything to do?
template <Config kConfig>
__device__ __forceinline__ bool has_begun(const Shared<kConfig>& shared) {
    __syncthreads();
    return shared.block.exists() && shared.broken == 0;
}

/// Registers change hands while the number of the thread block is on its way.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) backward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (warpgroup == 0) {
        ptx::give_registers<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (const CUtensorMap* map : {&launch.k, &launch.q, &launch.v, &launch.d_o}) {
                ptx::prefetch_tensor_map(*map);
            }
        }
        if (!has_begun(shared)) return;
        if constexpr (kConfig.may_finish()) {
            if (shared.block.finishes) return produce<kConfig, Order::falling, true>(launch, shared);
        }
        if (shared.block.blocks.rising) produce<kConfig, Order::rising>(launch, shared);
        else if (shared.block.blocks.parted) produce<kConfig, Order::in_parts>(launch, shared);
        else produce<kConfig, Order::falling>(launch, shared);
        return;
    }
    if constexpr (kConfig.dq_apart()) {
        if (warpgroup == Config::kConsumers + 1) {
            ptx::give_registers<Config::kDqRegisters>();
            if (!has_begun(shared)) return;
            return run_or_finish<QueriesConsumer<T, kConfig>>(launch, shared, 0);
        }
    }
    // Blocks that started earlier come earlier in the order: nobody waits for one that has not started.
    constexpr unsigned kFirstConsumer = 128;
    unsigned number = 0;
    int broken = 0;
    if (threadIdx.x == kFirstConsumer) {
        number = atomicAdd(&launch.workspace.start->next_block, 1);
        broken = launch.workspace.start->broken;
    }
    ptx::take_registers<kConfig.consumer_registers()>();
    if (threadIdx.x == kFirstConsumer) begin<T>(launch, shared, number, broken);
    if (!has_begun(shared)) return;
    consume<T>(launch, shared, warpgroup - 1);
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
