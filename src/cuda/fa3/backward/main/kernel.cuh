// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3 backward: K/V blocks outer, in shared memory; blocks of queries inner.
#pragma once

#include <algorithm>

#include "cuda/fa3/backward/main/epilogue.cuh"
#include "cuda/fa3/backward/main/persistent.cuh"
#include "cuda/fa3/backward/main/producer.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3::backward {

template <class OfConsumer, bool kFinishes = false, Config kConfig>
__device__ __forceinline__ void run(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    OfConsumer consumer{{ConsumerPlace<kConfig>{}, launch, shared, warpgroup}};
    if constexpr (requires { consumer.template run<kFinishes>(); }) consumer.template run<kFinishes>();
    else consumer.run();
    store_gradients(consumer);
}

/// What a consumer warpgroup that has keys does.
template <class T, Config kConfig>
__device__ __forceinline__ void consume(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    if constexpr (kConfig.goes_on()) consume_blocks<T>(launch, shared, warpgroup);
    else if constexpr (kConfig.dq_apart()) run<KeysConsumer<T, kConfig>>(launch, shared, warpgroup);
    else if constexpr (!kConfig.roles()) run<Consumer<T, kConfig>>(launch, shared, warpgroup);
    else if (warpgroup == 0) run<WeightsConsumer<T, kConfig>>(launch, shared, 0);
    else run<ScoresConsumer<T, kConfig>>(launch, shared, 1);
}

/// And the producer's.
template <class T, Config kConfig>
__device__ __forceinline__ void produce(const Launch& launch, Shared<kConfig>& shared) {
    if constexpr (kConfig.goes_on()) {
        produce_blocks<T>(launch, shared);
    } else {
        if constexpr (kConfig.may_finish()) {
            if (shared.block.finishes) return produce<kConfig, Order::falling, true>(launch, shared);
        }
        if (shared.block.blocks.rising) produce<kConfig, Order::rising>(launch, shared);
        else if (shared.block.blocks.parted) produce<kConfig, Order::in_parts>(launch, shared);
        else produce<kConfig, Order::falling>(launch, shared);
    }
}

/// One thread: which keys the thread block works on, first; the first copies are on their way as soon as that is known.
template <class T, Config kConfig>
__device__ __forceinline__ void begin(const Launch& launch, Shared<kConfig>& shared, unsigned number, int broken) {
    shared.init_barriers();
    KeyBlock<kConfig>& block = shared.block;
    if constexpr (kConfig.goes_on()) set_existing(launch, block, number);
    else block.set_place(launch, number);
    if (broken != 0) block.n = block.blocks.count_kv;
    if (!block.exists()) return;
    if (block.blocks.rising) load_first<kConfig, true>(launch, shared);
    else load_first<kConfig, false>(launch, shared);
    set_residual<T>(launch, block);
    if constexpr (kConfig.goes_on()) ptx::mbarrier_arrive(shared.on.block_ring.full[0]);
}

/// All threads: waits for begin(). Is there anything to do?
template <Config kConfig>
__device__ __forceinline__ bool has_begun(const Shared<kConfig>& shared) {
    __syncthreads();
    return shared.block.exists();
}

/// Registers change hands while the number of the thread block is on its way.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) backward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (const CUtensorMap* map : {&launch.k, &launch.q, &launch.v, &launch.d_o}) {
                ptx::prefetch_tensor_map(*map);
            }
        }
        if (has_begun(shared)) produce<T>(launch, shared);
        return;
    }
    if constexpr (kConfig.dq_apart()) {
        if (warpgroup == Config::kConsumers + 1) {
            ptx::setmaxnreg_dec<Config::kDqRegisters>();
            if (!has_begun(shared)) return;
            if (shared.block.finishes) run<QueriesConsumer<T, kConfig>, true>(launch, shared, 0);
            else run<QueriesConsumer<T, kConfig>>(launch, shared, 0);
            return;
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
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    if (threadIdx.x == kFirstConsumer) begin<T>(launch, shared, number, broken);
    if (has_begun(shared)) consume<T>(launch, shared, warpgroup - 1);
}

template <class T, class Shape>
cudaError_t start_backward(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    unsigned blocks = launch.numbers;
    if constexpr (Shape::kConfig.goes_on()) blocks = std::min(blocks, static_cast<unsigned>(launch.multiprocessors));
    return start(backward_kernel<T, Shape>, blocks, Shape::kConfig.threads(), kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
