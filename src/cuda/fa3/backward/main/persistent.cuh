// SPDX-License-Identifier: Apache-2.0
//
// A thread block that takes one block of keys after the other (Config::goes_on). When its consumers have multiplied by
// K for the last time, the thread that copies draws the next number and sends for the next K, Q, V and dO, each as soon
// as its memory is free: dV and dK of the last block go out meanwhile. Nothing but where they stand in the rings is
// kept by threads from one block to the next.
//
// A number is drawn no earlier than that: numbers that were drawn early and begun late would be waited for.
//
//   the thread that copies   Shared::block, on.block_ring --> consumers, each warpgroup its copy: on.own
//   the first of them        on.own[0], on.own_ring       --> threads that add to dQ
#pragma once

#include "cuda/fa3/backward/main/epilogue.cuh"
#include "cuda/fa3/backward/main/producer.cuh"

namespace tessera::cuda::fa3::backward {

/// One thread: the block of keys of this number, or, if there is none, of the next one that is drawn; one that does not
/// exist where none is left.
template <Config kConfig>
__device__ __forceinline__ void set_existing(const Launch& launch, KeyBlock<kConfig>& block, unsigned number) {
    while (true) {
        if (number >= launch.numbers) {
            block.n = block.blocks.count_kv = 0;
            return;
        }
        block.set_place(launch, number);
        if (block.exists()) return;
        number = atomicAdd(&launch.workspace.start->next_block, 1);
    }
}

/// One thread: what follows from the block's place.
template <class T, Config kConfig>
__device__ __forceinline__ void set_residual(const Launch& launch, KeyBlock<kConfig>& block) {
    block.set_order(launch);
    if constexpr (kHeld<T>) {
        block.unit = gradient_unit<T>(launch, block.batch, block.kv_head, block.share) / kWeightUnit<T>;
    }
}

/// One thread: lets consumers know of Shared::block, and starts the copies of its K, V and first step.
template <class T, bool kRising, Config kConfig>
__device__ __forceinline__ void load_beginning(const Launch& launch, Shared<kConfig>& shared) {
    LoaderPlace& at = shared.on.loader;
    Loader<kConfig, kRising> loader{launch, shared, {at.q_stage, at.q_phase}, {at.do_stage, at.do_phase}};
    copy_keys(launch, shared.block, shared.k, launch.k, shared.k_full);
    if (loader.step.more()) loader.load_q();
    set_residual<T>(launch, shared.block);
    ptx::mbarrier_arrive(shared.on.block_ring.full[0]);
    wait_for(shared.on.v_empty, at.parity);
    copy_keys(launch, shared.block, shared.v, launch.v, shared.v_full);
    if (loader.step.more()) loader.load_do();
}

/// One thread: the steps of Shared::block but for the first.
template <bool kRising, Config kConfig>
__device__ __forceinline__ void load_steps(const Launch& launch, Shared<kConfig>& shared) {
    LoaderPlace& at = shared.on.loader;
    Loader<kConfig, kRising> loader{launch, shared, {at.q_stage, at.q_phase}, {at.do_stage, at.do_phase}};
    loader.load_others();
    at = {at.parity, static_cast<unsigned char>(loader.q.stage), static_cast<unsigned char>(loader.q.phase),
          static_cast<unsigned char>(loader.d_o.stage), static_cast<unsigned char>(loader.d_o.phase)};
}

/// One thread: all copies. Those that begin the first block are started by begin().
template <class T, Config kConfig>
__device__ __forceinline__ void load_blocks(const Launch& launch, Shared<kConfig>& shared) {
    LoaderPlace& at = shared.on.loader;
    at = {};
    while (true) {
        if (shared.block.blocks.rising) load_steps<true>(launch, shared);
        else load_steps<false>(launch, shared);
        wait_for(shared.on.k_empty, at.parity);
        const unsigned number = atomicAdd(&launch.workspace.start->next_block, 1);
        wait_for(shared.on.block_ring.empty[0], at.parity);
        set_existing(launch, shared.block, number);
        if (!shared.block.exists()) break;
        if (shared.block.blocks.rising) load_beginning<T, true>(launch, shared);
        else load_beginning<T, false>(launch, shared);
        at.parity ^= 1;
    }
    ptx::mbarrier_arrive(shared.on.block_ring.full[0]);
}

/// One thread of those that see to the sums of dQ: its work on one block of keys after the other.
template <Config kConfig, class Work>
__device__ __forceinline__ void for_all_blocks(Shared<kConfig>& shared, int adder, const Work& work) {
    const KeyBlock<kConfig>& block = shared.on.own[0];
    while (true) {
        wait_for(shared.on.own_ring.full[0], shared.on.adder_parity[adder]);
        if (!block.exists()) return;
        work(block);
        ptx::mbarrier_arrive(shared.on.own_ring.empty[0]);
        shared.on.adder_parity[adder] ^= 1;
    }
}

template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_blocks(const Launch& launch, Shared<kConfig>& shared) {
    AdderParities parity;
    for_all_blocks(shared, kHalf, [&](const KeyBlock<kConfig>& block) {
        if (block.finishes) return add_or_bring_dq<kConfig, kHalf>(launch, shared, block, parity);
        const int steps = Steps<false>(block.blocks, block.n, block.blocks.share_heads).count();
        add_dq_in_turn<kConfig, kHalf>(launch, shared, steps, parity);
    });
}

template <Config kConfig>
__device__ __forceinline__ void order_blocks(const Launch& launch, Shared<kConfig>& shared) {
    AdderParities parity;
    for_all_blocks(shared, Config::kConsumers, [&](const KeyBlock<kConfig>& block) {
        if (block.finishes) return;
        if (block.blocks.rising) keep_order<kConfig, Order::rising>(launch, shared, block, parity);
        else if (block.blocks.parted) keep_order<kConfig, Order::in_parts>(launch, shared, block, parity);
        else keep_order<kConfig, Order::falling>(launch, shared, block, parity);
    });
}

template <class T, Config kConfig>
__device__ __forceinline__ void produce_blocks(const Launch& launch, Shared<kConfig>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) load_blocks<T>(launch, shared);
    else if (thread == 32) add_blocks<kConfig, 0>(launch, shared);
    else if (thread == 64) add_blocks<kConfig, 1>(launch, shared);
    else if (thread == 96) order_blocks(launch, shared);
}

/// A consumer warpgroup: waits for what is known of the next block of keys, and copies it. Is there one?
template <Config kConfig>
__device__ __forceinline__ bool take_block(Shared<kConfig>& shared, int warpgroup) {
    constexpr int kWords = sizeof(shared.block) / sizeof(int);
    static_assert(kWords <= 128 && sizeof(shared.block) % sizeof(int) == 0);
    auto& on = shared.on;
    const std::uint32_t parity = on.parity[warpgroup];
    const int thread = ptx::reload_thread_index() % 128;
    KeyBlock<kConfig>& own = on.own[warpgroup];
    wait_for(on.block_ring.full[0], parity);
    if (warpgroup == 0) wait_for(on.own_ring.empty[0], parity ^ 1);
    if (thread < kWords) reinterpret_cast<int*>(&own)[thread] = reinterpret_cast<const int*>(&shared.block)[thread];
    ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
    if (thread % 32 == 0) ptx::mbarrier_arrive(on.block_ring.empty[0]);
    if (warpgroup == 0 && thread == 0) ptx::mbarrier_arrive(on.own_ring.full[0]);
    return agreed(own.exists());
}

/// A consumer warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void consume_blocks(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    ConsumerPlace<kConfig> place;
#pragma unroll 1
    while (take_block(shared, warpgroup)) {
        Consumer<T, kConfig> consumer{{place, launch, shared, warpgroup}};
        consumer.run();
        store_gradients(consumer);
        place = consumer;
        ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
        if (ptx::reload_thread_index() % 128 == 0) shared.on.parity[warpgroup] ^= 1;
        ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
    }
    if (ptx::reload_thread_index() % 32 == 0) ptx::tma_store_wait_read();
}

}  // namespace tessera::cuda::fa3::backward
