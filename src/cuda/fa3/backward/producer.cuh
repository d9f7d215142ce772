// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup: one warp starts the copies of K, V, Q, dO, two add the warpgroups' halves of dQ up.
#pragma once

#include "cuda/fa3/backward/shared.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// Starts the copy of a tile: slabs of rows from row `row` of (head, batch).
template <class Slab, int kSlabs>
__device__ __forceinline__ void copy_in(Slab (&slabs)[kSlabs], const CUtensorMap& map, int row, int head, int batch,
                                        ptx::Mbarrier& full, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) ptx::tma_load_4d(slabs[s], map, s * kSlabColumns, row, head, batch, full, hint);
}

/// One thread: all copies.
template <Config kConfig>
__device__ __forceinline__ void load(const Launch& launch, Shared<kConfig>& shared) {
    const ForwardParams& p = launch.params.forward;
    const KeyBlock& block = shared.block;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : block.batch;
    Steps step(block.blocks, block.n, p.group);
    if (!step.more()) return;
    const int kv_row = block.first_kv + block.n * Config::kBlockKv;
    ptx::mbarrier_arrive_expect(shared.kv_full, sizeof(shared.k) + sizeof(shared.v));
    copy_in(shared.k, launch.k, kv_row, block.kv_head, batch, shared.kv_full, ptx::CacheHint::evict_first);
    copy_in(shared.v, launch.v, kv_row, block.kv_head, batch, shared.kv_full, ptx::CacheHint::evict_first);
    Turn<kConfig.q_stages> q;
    Turn<Config::kStages> d_o;
    for (; step.more(); step.advance(), q.advance(), d_o.advance()) {
        const int head = (block.kv_head + 1) * p.group - step.heads;
        const int row = block.first_q + step.m * Config::kBlockQ;
        wait_for(shared.q_ring.empty[q.stage], q.phase ^ 1);
        ptx::Mbarrier& q_full = shared.q_ring.full[q.stage];
        shared.block_q[q.stage] = step.m;
        shared.head[q.stage] = head;
        ptx::mbarrier_arrive_expect(q_full, sizeof(shared.q[0]) + sizeof(RowStats));
        copy_in(shared.q[q.stage], launch.q, row, head, batch, q_full, ptx::CacheHint::evict_last);
        ptx::bulk_load(&shared.stats[q.stage], launch.workspace.stats + block.block_q(launch, head, step.m),
                       sizeof(RowStats), q_full);
        wait_for(shared.do_ring.empty[d_o.stage], d_o.phase ^ 1);
        ptx::Mbarrier& do_full = shared.do_ring.full[d_o.stage];
        ptx::mbarrier_arrive_expect(do_full, sizeof(shared.d_o[0]));
        copy_in(shared.d_o[d_o.stage], launch.d_o, row, head, batch, do_full, ptx::CacheHint::evict_last);
    }
}

/// One thread: adds a warpgroup's half of dQ of every step to the sum in the workspace, when it is this block's turn.
template <Config kConfig>
__device__ __forceinline__ void add_dq(const Launch& launch, Shared<kConfig>& shared, int half) {
    const int group = launch.params.forward.group;
    const KeyBlock& block = shared.block;
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    std::uint32_t parity = 0;
    for (Steps step(block.blocks, block.n, group); step.more(); step.advance(), parity ^= 1) {
        // 32 bits are enough: the kernel refuses more blocks.
        const int head = (block.kv_head + 1) * group - step.heads + step.which * launch.params.forward.heads_q;
        const unsigned index = 2U * static_cast<unsigned>(head * launch.blocks_q + block.first_block_q + step.m) +
                               static_cast<unsigned>(half);
        float* sum = launch.workspace.dq + index * std::uint64_t{kBytes / sizeof(float)};
        int* counter = launch.workspace.counters + index;
        const int place = block.blocks.place(step.which, step.m, block.n);
        wait_for(shared.dq_full[half], parity, half);
        wait_until(place, [&] { return ptx::load_acquire(counter) == place; });
        ptx::fence_proxy_async_global();
        if (place == 0) ptx::bulk_store(sum, shared.dq[half], kBytes);
        else ptx::bulk_add(sum, shared.dq[half], kBytes);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(shared.dq_empty[half]);
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::store_release(counter, place + 1);
    }
}

}  // namespace tessera::cuda::fa3::backward
