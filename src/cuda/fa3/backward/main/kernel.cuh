// SPDX-License-Identifier: Apache-2.0
//
// The main kernel, by warpgroups: Algorithm 2 of the FlashAttention-2 paper. The outer loop over keys is the grid, and
// K and V of a CTA stay in shared memory; the inner loop over query blocks is in mainloop_*.cuh.
#pragma once

#include "cuda/fa3/backward/main/dq_accumulate.cuh"
#include "cuda/fa3/backward/main/epilogue.cuh"
#include "cuda/fa3/backward/main/loads.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3::backward {

template <class OfConsumer, bool kWritesDq = false, Config kConfig>
__device__ __forceinline__ void run(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    OfConsumer consumer{{ConsumerState<kConfig>{}, launch, shared, warpgroup}};
    if constexpr (requires { consumer.template run<kWritesDq>(); }) consumer.template run<kWritesDq>();
    else consumer.run();
    store_gradients(consumer);
}

/// A consumer warpgroup that computes dK, dV and its half of dQ. If it has written dQ, it loads the flag during the
/// stores of dK and dV.
template <class T, Config kConfig>
__device__ __forceinline__ void run_alone(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    Consumer<T, kConfig> consumer{{ConsumerState<kConfig>{}, launch, shared, warpgroup}};
    consumer.run();
    if constexpr (kConfig.may_write_dq()) {
        const int nonfinite_keys = consumer.writes_dq ? nonfinite_keys_met(launch) : 0;
        store_gradients(consumer);
        if (any_lane(nonfinite_keys != 0)) store_nan_of_written_dq(consumer, warpgroup);
    } else {
        store_gradients(consumer);
    }
}

/// A consumer warpgroup that has keys.
template <class T, Config kConfig>
__device__ __forceinline__ void consume(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    if constexpr (kConfig.dedicated_dq_warpgroup()) run<KeyConsumer<T, kConfig>>(launch, shared, warpgroup);
    else if constexpr (!kConfig.splits_dv_dk()) run_alone<T>(launch, shared, warpgroup);
    else if (warpgroup == 0) run<DvConsumer<T, kConfig>>(launch, shared, 0);
    else run<DkConsumer<T, kConfig>>(launch, shared, 1);
}

/// The producer's threads, for one key block. There is no code after the if ... else if: the compiler would keep the
/// other lanes of a thread's warp waiting there, and dQ would be added late.
template <Config kConfig, DqOrder kOrder, bool kWritesDq = false>
__device__ __forceinline__ void produce_block(const Launch& launch, Shared<kConfig>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) Loader<kConfig, kOrder == DqOrder::ascending>{launch, shared}.load_others();
    else if constexpr (kConfig.has_dq_order_thread() && !kWritesDq) {
        const int steps =
            StepIterator<false>(shared.block.schedule, shared.block.n, shared.block.schedule.heads_per_split).count();
        if (thread == 32) add_dq_when_signaled<kConfig, 0>(launch, shared, steps);
        else if (thread == 64) add_dq_when_signaled<kConfig, 1>(launch, shared, steps);
        else if (thread == 96) order_dq_additions<kConfig, kOrder>(launch, shared);
    } else if constexpr (kWritesDq) {
        if (thread == 32) add_or_fetch_dq<kConfig, 0>(launch, shared);
        else if (thread == 64) add_or_fetch_dq<kConfig, 1>(launch, shared);
    } else if constexpr (!kConfig.splits_dv_dk()) {
        if (thread == 32) add_dq<kConfig, 0, kOrder>(launch, shared);
        else if (thread == 64) add_dq<kConfig, 1, kOrder>(launch, shared);
    }
}

/// The producer warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void produce(const Launch& launch, Shared<kConfig>& shared) {
    if constexpr (kConfig.may_write_dq()) {
        if (shared.block.writes_dq) return produce_block<kConfig, DqOrder::descending, true>(launch, shared);
    }
    if (shared.block.schedule.ascending) produce_block<kConfig, DqOrder::ascending>(launch, shared);
    else if (shared.block.schedule.segmented) produce_block<kConfig, DqOrder::segmented>(launch, shared);
    else produce_block<kConfig, DqOrder::descending>(launch, shared);
}

/// One thread: sets the key block of this number, and starts its first loads as soon as the block is known.
template <class T, Config kConfig>
__device__ __forceinline__ void begin(const Launch& launch, Shared<kConfig>& shared, unsigned number) {
    shared.init_barriers();
    KeyBlock<kConfig>& block = shared.block;
    block.decode(launch, number);
    if (!block.exists()) return;
    if (block.schedule.ascending) load_first_tiles<kConfig, true>(launch, shared);
    else load_first_tiles<kConfig, false>(launch, shared);
    block.template set_derived<T>(launch);
}

/// All threads: waits for begin(). Returns whether there is a key block.
template <Config kConfig>
__device__ __forceinline__ bool has_begun(const Shared<kConfig>& shared) {
    __syncthreads();
    return shared.block.exists();
}

/// The main kernel. setmaxnreg runs while the number of the CTA is being loaded from memory.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) backward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (const CUtensorMap* map : {&launch.maps.k, &launch.maps.q, &launch.maps.v, &launch.maps.d_o}) {
                ptx::prefetch_tensor_map(*map);
            }
        }
        if (has_begun(shared)) produce<T>(launch, shared);
        return;
    }
    if constexpr (kConfig.dedicated_dq_warpgroup()) {
        if (warpgroup == Config::kConsumers + 1) {
            ptx::setmaxnreg_dec<Config::kDqWarpgroupRegisters>();
            if (!has_begun(shared)) return;
            if (shared.block.writes_dq) run<DqConsumer<T, kConfig>, true>(launch, shared, 0);
            else run<DqConsumer<T, kConfig>>(launch, shared, 0);
            return;
        }
    }
    // CTAs that start earlier get smaller numbers, so none waits for one that has not started (dq_order.hpp).
    constexpr unsigned kFirstConsumer = 128;
    unsigned number = 0;
    if (threadIdx.x == kFirstConsumer) number = atomicAdd(next_number(launch), 1);
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    if (threadIdx.x == kFirstConsumer) begin<T>(launch, shared, number);
    if (has_begun(shared)) consume<T>(launch, shared, warpgroup - 1);
}

template <class T, class Shape>
cudaError_t launch_backward(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of backward_config.h");
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    return start(backward_kernel<T, Shape>, launch.key_blocks.count, Shape::kConfig.threads(), kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
