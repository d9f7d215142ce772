// SPDX-License-Identifier: Apache-2.0
//
// The TMA loads of the producer: K and V of a key block, and Q, dO and RowStats of its steps. One thread issues them.
#pragma once

#include "cuda/fa3/backward/main/shared_storage.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/tma_copy.cuh"

namespace tessera::cuda::fa3::backward {

/// K or V.
template <Config kConfig, class Panel, int kPanels>
__device__ __forceinline__ void load_kv(const Launch& launch, const KeyBlock<kConfig>& block, Panel (&panels)[kPanels],
                                        const CUtensorMap& map, ptx::Mbarrier& full) {
    ptx::mbarrier_arrive_expect(full, sizeof(panels));
    copy_in(panels, map, block.first_kv + block.n * kConfig.block_kv, block.kv_head,
            launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch, full, ptx::CacheHint::evict_first);
}
/// Q of query block m, and its RowStats.
template <Config kConfig>
__device__ __forceinline__ void load_q_tile(const Launch& launch, Shared<kConfig>& shared, int stage, int m, int row,
                                            int head, int batch) {
    ptx::Mbarrier& full = shared.q_ring.full[stage];
    shared.block_q[stage] = m;
    shared.head[stage] = head;
    ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0]) + sizeof(shared.stats[0]));
    copy_in(shared.q[stage], launch.maps.q, row, head, batch, full, ptx::CacheHint::evict_last);
    ptx::bulk_load(shared.stats[stage],
                   launch.workspace.stats + shared.block.block_q(launch, head, m) * kConfig.row_stats(),
                   sizeof(shared.stats[0]), full);
}
template <Config kConfig>
__device__ __forceinline__ void load_do_tile(const Launch& launch, Shared<kConfig>& shared, int stage, int row,
                                             int head, int batch) {
    ptx::Mbarrier& full = shared.do_ring.full[stage];
    ptx::mbarrier_arrive_expect(full, sizeof(shared.d_o[0]));
    copy_in(shared.d_o[stage], launch.maps.d_o, row, head, batch, full, ptx::CacheHint::evict_last);
}

/// K, V and the tiles of the first step, in the order in which they are needed.
template <Config kConfig, bool kAscending>
__device__ __forceinline__ void load_first_tiles(const Launch& launch, Shared<kConfig>& shared) {
    const KeyBlock<kConfig>& block = shared.block;
    const int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch;
    const StepIterator<kAscending> step(block.schedule, block.n, block.schedule.heads_per_split);
    if (!step.more()) return;
    const int head = block.end_head - step.heads_left;
    const int row = block.first_q + step.m * kConfig.block_q;
    load_kv(launch, block, shared.k, launch.maps.k, shared.k_full);
    load_q_tile(launch, shared, 0, step.m, row, head, batch);
    load_kv(launch, block, shared.v, launch.maps.v, shared.v_full);
    load_do_tile(launch, shared, 0, row, head, batch);
}

/// Q and dO of the steps.
template <Config kConfig, bool kAscending>
struct Loader {
    const Launch& launch;
    Shared<kConfig>& shared;
    AnyPipelineState<kConfig.q_stages> q{};
    AnyPipelineState<kConfig.do_stages> d_o{};
    const KeyBlock<kConfig>& block = shared.block;
    int heads = block.schedule.heads_per_split;
    int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch;
    StepIterator<kAscending> step{block.schedule, block.n, heads};

    __device__ __forceinline__ int row() const { return block.first_q + step.m * kConfig.block_q; }
    __device__ __forceinline__ int head() const { return block.end_head - step.heads_left; }
    __device__ __forceinline__ void load_q() {
        wait_for(shared.q_ring.empty[q.index()], q.phase() ^ 1);
        load_q_tile(launch, shared, q.index(), step.m, row(), head(), batch);
    }
    __device__ __forceinline__ void load_do() {
        wait_for(shared.do_ring.empty[d_o.index()], d_o.phase() ^ 1);
        load_do_tile(launch, shared, d_o.index(), row(), head(), batch);
    }
    __device__ __forceinline__ void advance() { step.advance(heads), q.advance(), d_o.advance(); }
    /// Loads all steps after the current one.
    __device__ __forceinline__ void load_others() {
        if (!step.more()) return;
        while (true) {
            advance();
            if (!step.more()) break;
            load_q();
            load_do();
        }
    }
};

}  // namespace tessera::cuda::fa3::backward
