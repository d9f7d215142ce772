// SPDX-License-Identifier: Apache-2.0
//
// The way of a step's dQ out of the CTA: from the consumers' accumulators through shared memory to the accumulator in
// the workspace, in the fixed order of dq_order.hpp. Every query block of dQ has two halves, one for each of two
// producer threads: of its columns, or, with a dedicated dQ warpgroup, of its queries.
//
//     consumer warpgroup w                          producer thread of half w
//     wait for dq_empty[w]                          wait until the dQ semaphore has come to this key block's position
//     store_dq(): shared.dq[w]                      wait for dq_full[w]
//     signal_dq(): arrive at dq_full[w]             TMA store (position 0) or TMA reduce-add; arrive at dq_empty[w]
//                                                   raise the semaphore
//
// Reading a semaphore takes some 400 clocks and the fence before its store some 800 (TRIED.md). At head_dim 128 that is
// a third of a step. So an order thread waits for the semaphores of both halves, signals the other two when they may
// add, and raises the semaphores (order_dq_additions).
//
// If the last key block to add writes dQ (KeyBlock::writes_dq), the producer threads fetch the accumulator into shared
// memory instead (add_or_fetch_dq), and the consumers add their own dQ, scale, round and write it (write_dq).
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// The semaphore of a query block in one accumulator of dQ. It counts the key blocks that have added.
struct DqSemaphore {
    unsigned block_q;  ///< among those of all heads and both accumulators; the kernel refuses what exceeds 32 bits
    int position;      ///< value at which this key block adds

    template <DqOrder kOrder, Config kConfig>
    __device__ __forceinline__ void set(const Launch& launch, const KeyBlock<kConfig>& block,
                                        const StepIterator<kOrder == DqOrder::ascending>& step) {
        const ForwardParams& p = launch.params.forward;
        const int head = block.end_head - step.heads_left + step.accumulator * p.heads_q;
        block_q = static_cast<unsigned>(head * launch.blocks_q + block.first_block_q + step.m);
        if constexpr (kOrder == DqOrder::ascending) {
            position = block.n;
        } else if constexpr (kOrder == DqOrder::descending) {
            position = block.schedule.position_descending(step.accumulator, step.m, block.n);
        } else {
            position = block.schedule.position_in_segment(step.m, block.n, block.segment_begin, block.segment_last);
        }
    }
    template <int kHalf>
    __device__ __forceinline__ int* counter(const Launch& launch) const {
        return launch.workspace.dq_semaphores + (2U * block_q + unsigned{kHalf});
    }
    template <int kHalf>
    __device__ __forceinline__ bool may_add(const Launch& launch) const {
        return ptx::load_acquire(counter<kHalf>(launch)) == position;
    }
    template <int kHalf>
    __device__ __forceinline__ void raise(const Launch& launch) const {
        ptx::store_release(counter<kHalf>(launch), position + 1);
    }
};

/// A half of a query block in the accumulator; `bytes`: of a half.
__device__ __forceinline__ float* dq_half(const Launch& launch, unsigned block_q, int half, std::uint32_t bytes) {
    return launch.workspace.dq + (block_q * std::uint64_t{2} + static_cast<unsigned>(half)) * (bytes / sizeof(float));
}

/// Adds a half of dQ from shared memory; the first key block to add stores it, so nothing has to be zeroed.
__device__ __forceinline__ void start_add(float* sum, const float* dq, std::uint32_t bytes, bool first) {
    if (first) ptx::bulk_store(sum, dq, bytes);
    else ptx::bulk_reduce_add(sum, dq, bytes);
    ptx::tma_store_commit();
}

/// One thread: adds its half of dQ in every step. It reads the next semaphore while the last addition is under way.
template <Config kConfig, int kHalf, DqOrder kOrder>
__device__ __forceinline__ void add_dq(const Launch& launch, Shared<kConfig>& shared) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    StepIterator<kOrder == DqOrder::ascending> step(shared.block.schedule, shared.block.n,
                                                    shared.block.schedule.heads_per_split);
    if (!step.more()) return;
    std::uint32_t parity = 0;
    bool may_add = false;
    DqSemaphore semaphore;
    semaphore.set<kOrder>(launch, shared.block, step);
    while (true) {
        wait_for(shared.dq_full[kHalf], parity, kHalf);
        parity ^= 1;
        if (!may_add) wait_until(semaphore.position, [&] { return semaphore.may_add<kHalf>(launch); });
        ptx::fence_proxy_async_global();
        start_add(dq_half(launch, semaphore.block_q, kHalf, kBytes), shared.dq[kHalf], kBytes, semaphore.position == 0);
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        const DqSemaphore added = semaphore;
        step.advance(shared.block.schedule.heads_per_split);
        if (step.more()) {
            semaphore.set<kOrder>(launch, shared.block, step);
            may_add = semaphore.may_add<kHalf>(launch);
        }
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        added.raise<kHalf>(launch);
        if (!step.more()) return;
    }
}

/// One thread: adds its half of dQ in every step, when order_dq_additions() signals that it may.
template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_dq_when_signaled(const Launch& launch, Shared<kConfig>& shared, int steps) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    for (std::uint32_t parity = 0; steps > 0; --steps, parity ^= 1) {
        wait_for(shared.dq_may_add, parity, kHalf);
        float* sum = dq_half(launch, shared.dq_block, kHalf, kBytes);
        const bool first = shared.dq_first;
        ptx::fence_proxy_async_global();
        wait_for(shared.dq_full[kHalf], parity, kHalf);
        start_add(sum, shared.dq[kHalf], kBytes, first);
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::mbarrier_arrive(shared.dq_added);
    }
}

/// The order thread: waits for the semaphore of each step's query block, signals the two threads that add, and raises
/// the semaphore when both have added. It reads the next semaphore while the last addition is under way, and its
/// fences, which take a fifth of a step, delay nobody.
template <Config kConfig, DqOrder kOrder>
__device__ __forceinline__ void order_dq_additions(const Launch& launch, Shared<kConfig>& shared) {
    const KeyBlock<kConfig>& block = shared.block;
    const int heads = block.schedule.heads_per_split;
    StepIterator<kOrder == DqOrder::ascending> step(block.schedule, block.n, heads);
    if (!step.more()) return;
    const auto wait = [&](const DqSemaphore& semaphore) {
        wait_until(semaphore.position, [&] { return semaphore.may_add<0>(launch); });
    };
    const auto signal = [&](const DqSemaphore& semaphore) {
        shared.dq_block = semaphore.block_q;
        shared.dq_first = semaphore.position == 0;
        ptx::mbarrier_arrive(shared.dq_may_add);
    };
    std::uint32_t parity = 0;
    DqSemaphore semaphore;
    semaphore.set<kOrder>(launch, block, step);
    wait(semaphore);
    signal(semaphore);
    while (true) {
        step.advance(heads);
        const bool more = step.more();
        DqSemaphore next = semaphore;
        bool may_add = false;
        if (more) {
            next.set<kOrder>(launch, block, step);
            may_add = next.may_add<0>(launch);
        }
        wait_for(shared.dq_added, parity);
        parity ^= 1;
        if (may_add) signal(next);
        semaphore.raise<0>(launch);
        if (!more) return;
        semaphore = next;
        if (!may_add) {
            wait(semaphore);
            signal(semaphore);
        }
    }
}

/// One thread for each half of dQ, in a key block that writes dQ. If the block adds last, it fetches the sum so far for
/// write_dq(); otherwise it adds dQ to the accumulator. dq_empty: shared.dq is free or holds the sum. dq_full: dQ is
/// stored there, or the sum has been read. With an order thread such a key block is the last one in all of its steps
/// (first_block_adds_last()).
template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_or_fetch_dq(const Launch& launch, Shared<kConfig>& shared) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    constexpr int kCounter = kConfig.has_dq_order_thread() ? 0 : kHalf;
    const KeyBlock<kConfig>& block = shared.block;
    const int heads = block.schedule.heads_per_split;
    StepIterator<false> step(block.schedule, block.n, heads);
    std::uint32_t parity = 0;
    while (step.more()) {
        DqSemaphore semaphore{};
        semaphore.set<DqOrder::segmented>(launch, block, step);
        float* sum = dq_half(launch, semaphore.block_q, kHalf, kBytes);
        const bool last = semaphore.position + 1 == block.schedule.key_blocks_of(step.m).end;
        const auto wait = [&] {
            wait_until(semaphore.position, [&] { return semaphore.may_add<kCounter>(launch); });
            ptx::fence_proxy_async_global();
        };
        shared.dq_target[kHalf] = !last                     ? DqTarget::accumulator
                                  : semaphore.position == 0 ? DqTarget::output_alone
                                                            : DqTarget::output_with_sum;
        if (last && semaphore.position > 0) {
            wait();
            ptx::mbarrier_arrive_expect(shared.dq_empty[kHalf], kBytes);
            ptx::bulk_load(shared.dq[kHalf], sum, kBytes, shared.dq_empty[kHalf]);
        } else {
            ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        }
        wait_for(shared.dq_full[kHalf], parity, kHalf);
        parity ^= 1;
        step.advance(heads);
        if (last) continue;
        wait();
        start_add(sum, shared.dq[kHalf], kBytes, semaphore.position == 0);
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        semaphore.raise<kCounter>(launch);
    }
}

/// A consumer: passes what store_dq() has written to the thread that adds it.
template <class T, Config kConfig>
__device__ __forceinline__ void signal_dq(ConsumerThread<T, kConfig>& c) {
    ptx::fence_proxy_async();
    c.arrive(c.shared.dq_full[c.warpgroup]);
}

/// A consumer: stores its half of dQ to shared memory, 16 bytes of a thread beside those of its neighbours.
template <class T, Config kConfig>
__device__ __forceinline__ void store_dq(ConsumerThread<T, kConfig>& c, const float (&dq)[kConfig.dq_columns() / 2]) {
    auto* out = reinterpret_cast<float4*>(c.shared.dq[c.warpgroup]) + c.thread() % 128;
#pragma unroll
    for (int j = 0; j < kConfig.dq_columns() / 8; ++j) {
        out[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
}

/// A consumer of the key block that adds last: writes dQ of the step whose Q is in stage `q_stage` to the output
/// tensor. Unless `alone`, what add_or_fetch_dq() has fetched is added first.
template <class T, Config kConfig>
__device__ __forceinline__ void write_dq(ConsumerThread<T, kConfig>& c, float (&dq)[kConfig.dq_columns() / 2],
                                         int q_stage, bool alone) {
    constexpr int kColumns = kConfig.dq_columns();
    Shared<kConfig>& shared = c.shared;
    const ForwardParams& p = c.launch.params.forward;
    const float factor = kFp16Scaled<T> ? p.scale / (c.ds_factor() * kPScale<T>) : p.scale;
    std::uint32_t packed[kColumns / 8][2];
    const auto* sum = reinterpret_cast<const float4*>(shared.dq[c.warpgroup]) + c.thread() % 128;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const float4 before = alone ? float4{} : sum[128 * j];
        packed[j][0] =
            ptx::pack<T>(fmaf(dq[4 * j] + before.x, factor, 0.0F), fmaf(dq[4 * j + 1] + before.y, factor, 0.0F));
        packed[j][1] =
            ptx::pack<T>(fmaf(dq[4 * j + 2] + before.z, factor, 0.0F), fmaf(dq[4 * j + 3] + before.w, factor, 0.0F));
    }
    // Whole rows are written, so the elements change lanes in the memory that the warp has read its part of the sum
    // from. Row r lies in its piece r / 4.
    static_assert(kColumns == kPanelColumns);
    const std::uint32_t own = ptx::shared_address(shared.dq[c.warpgroup]) + 512 * static_cast<unsigned>(c.warp());
    const auto address = [own](int row, int chunk) {
        return own + static_cast<unsigned>(2048 * (row / 4) + 128 * (row % 4) + 16 * (chunk ^ row % 8));
    };
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
        // Chunk j + lane / 16, as j is even. Written as a sum, ptxas of CUDA 13.0 has compiled it wrongly (TRIED.md).
        ptx::stmatrix_x4(address(c.lane() % 16, c.lane() / 16) ^ static_cast<unsigned>(16 * j), packed[j][0],
                         packed[j][1], packed[j + 1][0], packed[j + 1][1]);
    }
    __syncwarp();
    constexpr bool kByColumns = kConfig.block_q == Config::kRows;  // a half is columns, not queries
    const int chunk = c.lane() % 8;
    const int column = (kByColumns ? kColumns * c.warpgroup : 0) + 8 * chunk;
    const int first = shared.block_q[q_stage] * kConfig.block_q + (kByColumns ? 0 : Config::kRows * c.warpgroup) +
                      c.warp() * 16 + c.lane() / 8;
    const Rows& to = c.launch.params.dq;
    T* out = reinterpret_cast<T*>(to.data) + c.block().batch * to.batch + shared.head[q_stage] * to.head +
             first * to.row + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 words = ptx::load_shared(address(4 * i + c.lane() / 8, chunk));
        if (first + 4 * i < c.block().schedule.len_q && column < p.head_dim) {
            *reinterpret_cast<uint4*>(out + 4 * i * to.row) = words;
        }
    }
    ptx::fence_proxy_async();  // TMA writes the next sum to the memory of these rows
    c.arrive(shared.dq_full[c.warpgroup]);
}

/// Returns a value other than 0 if a key block of this call has found NaN or infinities in K. A key block that writes
/// dQ reads the flag after its last step: by then it has waited for the key blocks that add before it, and each of them
/// set the flag before it added.
__device__ __forceinline__ int nonfinite_keys_met(const Launch& launch) {
    return ptx::load_relaxed(&launch.workspace.state->nonfinite_keys);
}

/// Stores the NaN of infinite keys over rows of dQ that this key block has written (store_nan_of_keys): the warp's rows
/// of half `half` of each query block. By a consumer, after the last step.
template <class T, Config kConfig>
__device__ __forceinline__ void store_nan_of_written_dq(const ConsumerThread<T, kConfig>& c, int half) {
    constexpr bool kByColumns = kConfig.block_q == Config::kRows;
    const KeyBlock<kConfig>& block = c.block();
    const int heads = block.schedule.heads_per_split;
    __syncwarp();
#pragma unroll 1
    for (StepIterator<false> step(block.schedule, block.n, heads); step.more(); step.advance(heads)) {
        DqSemaphore semaphore{};
        semaphore.set<DqOrder::segmented>(c.launch, block, step);
        if (semaphore.position + 1 != block.schedule.key_blocks_of(step.m).end) continue;
        const int query = step.m * kConfig.block_q + (kByColumns ? 0 : Config::kRows * half) + 16 * c.warp();
        store_nan_of_keys<T>(c.launch, block.schedule,
                             {.batch = block.batch,
                              .head = block.end_head - step.heads_left,
                              .first_q = block.first_q,
                              .first_kv = block.first_kv,
                              .query = query,
                              .queries = 16,
                              .column = kByColumns ? kConfig.dq_columns() * half : 0,
                              .columns = kConfig.dq_columns()},
                             c.lane(), 32);
    }
}

/// A consumer of the key block that adds last to some query blocks.
template <class T, Config kConfig>
__device__ __forceinline__ void store_or_write_dq(ConsumerThread<T, kConfig>& c, float (&dq)[kConfig.dq_columns() / 2],
                                                  int q_stage) {
    wait_for(c.shared.dq_empty[c.warpgroup], c.steps % 2, c.warpgroup);
    const DqTarget target = c.shared.dq_target[c.warpgroup];
    if (any_lane(target != DqTarget::accumulator)) {
        write_dq(c, dq, q_stage, any_lane(target == DqTarget::output_alone));
    } else {
        store_dq(c, dq);
        signal_dq(c);
    }
}

}  // namespace tessera::cuda::fa3::backward
