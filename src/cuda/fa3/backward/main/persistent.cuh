// SPDX-License-Identifier: Apache-2.0
//
// The persistent CTA (Config::persistent): one CTA for each multiprocessor, which takes one key block after the other.
// When its consumers have read K for the last time, the producer thread that loads draws the next number. It loads the
// next K, Q, V and dO, each as soon as its memory is free, while dV and dK of the last key block are stored. Threads
// keep nothing from one key block to the next but their pipeline states.
//
// The number is drawn no earlier than that. A key block whose number is drawn early and which is begun late would delay
// the CTAs that wait for its dQ.
//
//   producer thread that loads    Shared::block         -- block_ring --> consumer warpgroups, a copy each: own_block
//   first consumer warpgroup      own_block[0]          -- own_ring   --> threads that add to dQ
#pragma once

#include "cuda/fa3/backward/main/dq_accumulate.cuh"
#include "cuda/fa3/backward/main/epilogue.cuh"
#include "cuda/fa3/backward/main/loads.cuh"

namespace tessera::cuda::fa3::backward {

/// One thread: sets the key block of this number, or, if it has none, of the next number with one. If none is left, the
/// block does not exist.
template <Config kConfig>
__device__ __forceinline__ void find_existing(const Launch& launch, KeyBlock<kConfig>& block, unsigned number) {
    while (true) {
        block.decode(launch, number);
        if (block.exists() || number >= launch.key_blocks.count) return;
        number = atomicAdd(next_number(launch), 1);
    }
}

/// One thread: publishes Shared::block to the consumers, and starts the loads of its K, V and first step.
template <class T, bool kAscending, Config kConfig>
__device__ __forceinline__ void load_block_start(const Launch& launch, Shared<kConfig>& shared) {
    LoadState& at = shared.persistent.loads;
    Loader<kConfig, kAscending> loader{launch, shared, {at.q_index, at.q_phase}, {at.do_index, at.do_phase}};
    load_kv(launch, shared.block, shared.k, launch.maps.k, shared.k_full);
    if (loader.step.more()) loader.load_q();
    shared.block.template set_derived<T>(launch);
    ptx::mbarrier_arrive(shared.persistent.block_ring.full[0]);
    wait_for(shared.persistent.v_empty, at.parity);
    load_kv(launch, shared.block, shared.v, launch.maps.v, shared.v_full);
    if (loader.step.more()) loader.load_do();
}

/// One thread: loads the steps of Shared::block after the first.
template <bool kAscending, Config kConfig>
__device__ __forceinline__ void load_steps(const Launch& launch, Shared<kConfig>& shared) {
    LoadState& at = shared.persistent.loads;
    Loader<kConfig, kAscending> loader{launch, shared, {at.q_index, at.q_phase}, {at.do_index, at.do_phase}};
    loader.load_others();
    at = {at.parity, static_cast<unsigned char>(loader.q.index()), static_cast<unsigned char>(loader.q.phase()),
          static_cast<unsigned char>(loader.d_o.index()), static_cast<unsigned char>(loader.d_o.phase())};
}

/// One thread: all loads but those that begin() starts.
template <class T, Config kConfig>
__device__ __forceinline__ void load_blocks(const Launch& launch, Shared<kConfig>& shared) {
    LoadState& at = shared.persistent.loads;
    at = {};
    while (true) {
        if (shared.block.schedule.ascending) load_steps<true>(launch, shared);
        else load_steps<false>(launch, shared);
        wait_for(shared.persistent.k_empty, at.parity);
        const unsigned number = atomicAdd(next_number(launch), 1);
        wait_for(shared.persistent.block_ring.empty[0], at.parity);
        find_existing(launch, shared.block, number);
        if (!shared.block.exists()) break;
        if (shared.block.schedule.ascending) load_block_start<T, true>(launch, shared);
        else load_block_start<T, false>(launch, shared);
        at.parity ^= 1;
    }
    ptx::mbarrier_arrive(shared.persistent.block_ring.full[0]);
}

/// The `thread`-th of the threads that add to dQ or keep its order: calls work(block) for each key block.
template <Config kConfig, class Work>
__device__ __forceinline__ void for_each_block(Shared<kConfig>& shared, int thread, const Work& work) {
    const KeyBlock<kConfig>& block = shared.persistent.own_block[0];
    while (true) {
        wait_for(shared.persistent.own_ring.full[0], shared.persistent.dq_parity[thread]);
        if (!block.exists()) return;
        work(block);
        ptx::mbarrier_arrive(shared.persistent.own_ring.empty[0]);
        shared.persistent.dq_parity[thread] ^= 1;
    }
}

template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_dq_of_blocks(const Launch& launch, Shared<kConfig>& shared) {
    DqParities parity;
    for_each_block(shared, kHalf, [&](const KeyBlock<kConfig>& block) {
        if (block.writes_dq) return add_or_fetch_dq<kConfig, kHalf>(launch, shared, block, parity);
        const int steps = StepIterator<false>(block.schedule, block.n, block.schedule.heads_per_split).count();
        add_dq_when_signaled<kConfig, kHalf>(launch, shared, steps, parity);
    });
}

template <Config kConfig>
__device__ __forceinline__ void order_dq_of_blocks(const Launch& launch, Shared<kConfig>& shared) {
    DqParities parity;
    for_each_block(shared, Config::kConsumers, [&](const KeyBlock<kConfig>& block) {
        if (block.writes_dq) return;
        if (block.schedule.ascending) order_dq_additions<kConfig, DqOrder::ascending>(launch, shared, block, parity);
        else if (block.schedule.segmented)
            order_dq_additions<kConfig, DqOrder::segmented>(launch, shared, block, parity);
        else order_dq_additions<kConfig, DqOrder::descending>(launch, shared, block, parity);
    });
}

/// The producer warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void produce_blocks(const Launch& launch, Shared<kConfig>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) load_blocks<T>(launch, shared);
    else if (thread == 32) add_dq_of_blocks<kConfig, 0>(launch, shared);
    else if (thread == 64) add_dq_of_blocks<kConfig, 1>(launch, shared);
    else if (thread == 96) order_dq_of_blocks(launch, shared);
}

/// A consumer warpgroup: waits for the next key block and copies its KeyBlock. Returns whether there is one.
template <Config kConfig>
__device__ __forceinline__ bool acquire_block(Shared<kConfig>& shared, int warpgroup) {
    constexpr int kWords = sizeof(shared.block) / sizeof(int);
    static_assert(kWords <= 128 && sizeof(shared.block) % sizeof(int) == 0);
    auto& persistent = shared.persistent;
    const std::uint32_t parity = persistent.parity[warpgroup];
    const int thread = ptx::reload_thread_index() % 128;
    KeyBlock<kConfig>& own = persistent.own_block[warpgroup];
    wait_for(persistent.block_ring.full[0], parity);
    if (warpgroup == 0) wait_for(persistent.own_ring.empty[0], parity ^ 1);
    if (thread < kWords) reinterpret_cast<int*>(&own)[thread] = reinterpret_cast<const int*>(&shared.block)[thread];
    ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
    if (thread % 32 == 0) ptx::mbarrier_arrive(persistent.block_ring.empty[0]);
    if (warpgroup == 0 && thread == 0) ptx::mbarrier_arrive(persistent.own_ring.full[0]);
    return any_lane(own.exists());
}

/// A consumer warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void consume_blocks(const Launch& launch, Shared<kConfig>& shared, int warpgroup) {
    ConsumerState<kConfig> state;
#pragma unroll 1
    while (acquire_block(shared, warpgroup)) {
        Consumer<T, kConfig> consumer{{state, launch, shared, warpgroup}};
        consumer.run();
        store_gradients(consumer);
        state = consumer;
        ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
        if (ptx::reload_thread_index() % 128 == 0) shared.persistent.parity[warpgroup] ^= 1;
        ptx::named_barrier_sync(kOwnBarrier + warpgroup, 128);
    }
    if (ptx::reload_thread_index() % 32 == 0) ptx::tma_store_wait_read();
}

}  // namespace tessera::cuda::fa3::backward
