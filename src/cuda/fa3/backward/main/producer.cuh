// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup: one warp starts the copies of K, V, Q, dO, two add the warpgroups' halves of dQ up.
#pragma once

#include "cuda/fa3/backward/main/shared_storage.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// Starts the copy of a tile: panels of rows from row `row` of (head, batch).
template <class Panel, int kPanels>
__device__ __forceinline__ void copy_in(Panel (&panels)[kPanels], const CUtensorMap& map, int row, int head, int batch,
                                        ptx::Mbarrier& full, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) ptx::tma_load_4d(panels[s], map, s * kPanelColumns, row, head, batch, full, hint);
}

/// One thread: K or V.
template <Config kConfig, class Panel, int kPanels>
__device__ __forceinline__ void copy_keys(const Launch& launch, const KeyBlock<kConfig>& block,
                                          Panel (&panels)[kPanels], const CUtensorMap& map, ptx::Mbarrier& full) {
    ptx::mbarrier_arrive_expect(full, sizeof(panels));
    copy_in(panels, map, block.first_kv + block.n * kConfig.block_kv, block.kv_head,
            launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch, full, ptx::CacheHint::evict_first);
}
/// Q of block m, and what the delta kernel says of it.
template <Config kConfig>
__device__ __forceinline__ void copy_q(const Launch& launch, Shared<kConfig>& shared, int stage, int m, int row,
                                       int head, int batch) {
    ptx::Mbarrier& full = shared.q_ring.full[stage];
    shared.block_q[stage] = m;
    shared.head[stage] = head;
    ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0]) + sizeof(shared.stats[0]));
    copy_in(shared.q[stage], launch.q, row, head, batch, full, ptx::CacheHint::evict_last);
    ptx::bulk_load(shared.stats[stage],
                   launch.workspace.stats + shared.block.block_q(launch, head, m) * kConfig.row_stats(),
                   sizeof(shared.stats[0]), full);
}
template <Config kConfig>
__device__ __forceinline__ void copy_do(const Launch& launch, Shared<kConfig>& shared, int stage, int row, int head,
                                        int batch) {
    ptx::Mbarrier& full = shared.do_ring.full[stage];
    ptx::mbarrier_arrive_expect(full, sizeof(shared.d_o[0]));
    copy_in(shared.d_o[stage], launch.d_o, row, head, batch, full, ptx::CacheHint::evict_last);
}

/// One thread: K, V and what the first step takes, in the order in which it is needed. (A thread block that goes on has
/// them loaded even where there is no step: they come once for each block of keys.)
template <Config kConfig, bool kRising>
__device__ __forceinline__ void load_first(const Launch& launch, Shared<kConfig>& shared) {
    const KeyBlock<kConfig>& block = shared.block;
    const int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch;
    const Steps<kRising> step(block.blocks, block.n, block.blocks.share_heads);
    if (!kConfig.goes_on() && !step.more()) return;
    const int head = block.end_head - step.heads;
    const int row = block.first_q + step.m * kConfig.block_q;
    copy_keys(launch, block, shared.k, launch.k, shared.k_full);
    if (step.more()) copy_q(launch, shared, 0, step.m, row, head, batch);
    copy_keys(launch, block, shared.v, launch.v, shared.v_full);
    if (step.more()) copy_do(launch, shared, 0, row, head, batch);
}

/// One thread: what the steps take.
template <Config kConfig, bool kRising>
struct Loader {
    const Launch& launch;
    Shared<kConfig>& shared;
    Turn<kConfig.q_stages> q{};
    Turn<kConfig.do_stages> d_o{};
    const KeyBlock<kConfig>& block = shared.block;
    int heads = block.blocks.share_heads;
    int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : block.batch;
    Steps<kRising> step{block.blocks, block.n, heads};

    __device__ __forceinline__ int row() const { return block.first_q + step.m * kConfig.block_q; }
    __device__ __forceinline__ int head() const { return block.end_head - step.heads; }
    __device__ __forceinline__ void load_q() {
        wait_for(shared.q_ring.empty[q.stage], q.phase ^ 1);
        copy_q(launch, shared, q.stage, step.m, row(), head(), batch);
    }
    __device__ __forceinline__ void load_do() {
        wait_for(shared.do_ring.empty[d_o.stage], d_o.phase ^ 1);
        copy_do(launch, shared, d_o.stage, row(), head(), batch);
    }
    __device__ __forceinline__ void advance() { step.advance(heads), q.advance(), d_o.advance(); }
    /// All steps but the first, at which it stands.
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

/// Whose turn it is to add to a half of a block of dQ.
struct DqTurn {
    unsigned block_q;  ///< among those of all heads and both sums; 32 bits are enough: the kernel refuses more
    int place;         ///< of this block of keys among those that add to it

    template <Order kOrder, Config kConfig>
    __device__ __forceinline__ void set(const Launch& launch, const KeyBlock<kConfig>& block,
                                        const Steps<kOrder == Order::rising>& step) {
        const ForwardParams& p = launch.params.forward;
        const int head = block.end_head - step.heads + step.which * p.heads_q;
        block_q = static_cast<unsigned>(head * launch.blocks_q + block.first_block_q + step.m);
        if constexpr (kOrder == Order::rising) place = block.n;
        else if constexpr (kOrder == Order::falling) place = block.blocks.place_falling(step.which, step.m, block.n);
        else place = block.blocks.place_in_part(step.m, block.n, block.before, block.most);
    }
    template <int kHalf>
    __device__ __forceinline__ int* counter(const Launch& launch) const {
        return launch.workspace.counters + (2U * block_q + unsigned{kHalf});
    }
    template <int kHalf>
    __device__ __forceinline__ bool has_come(const Launch& launch) const {
        return ptx::load_acquire(counter<kHalf>(launch)) == place;
    }
};

/// One thread: adds what a warpgroup makes of dQ in every step, its half, to the sum in the workspace, when it is this
/// block's turn. Looks for its next turn while the last addition is under way.
template <Config kConfig, int kHalf, Order kOrder>
__device__ __forceinline__ void add_dq(const Launch& launch, Shared<kConfig>& shared) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    Steps<kOrder == Order::rising> step(shared.block.blocks, shared.block.n, shared.block.blocks.share_heads);
    if (!step.more()) return;
    std::uint32_t parity = 0;
    bool has_come = false;
    DqTurn turn;
    turn.set<kOrder>(launch, shared.block, step);
    while (true) {
        wait_for(shared.dq_full[kHalf], parity, kHalf);
        parity ^= 1;
        if (!has_come) wait_until(turn.place, [&] { return turn.template has_come<kHalf>(launch); });
        ptx::fence_proxy_async_global();
        float* sum =
            launch.workspace.dq + (turn.block_q * std::uint64_t{2} + unsigned{kHalf}) * (kBytes / sizeof(float));
        if (turn.place == 0) ptx::bulk_store(sum, shared.dq[kHalf], kBytes);
        else ptx::bulk_reduce_add(sum, shared.dq[kHalf], kBytes);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        const DqTurn before = turn;
        step.advance(shared.block.blocks.share_heads);
        if (step.more()) {
            turn.set<kOrder>(launch, shared.block, step);
            has_come = turn.template has_come<kHalf>(launch);
        }
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::store_release(before.template counter<kHalf>(launch), before.place + 1);
        if (!step.more()) return;
    }
}

/// Parities of what adders wait for.
struct AdderParities {
    std::uint32_t full = 0;  ///< dq_full
    std::uint32_t turn = 0;  ///< dq_turn; of the thread that keeps the order, dq_added
};

/// One thread: adds what a warpgroup makes of dQ in every step, when keep_order() says that it is this block's turn.
template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_dq_in_turn(const Launch& launch, Shared<kConfig>& shared, int steps,
                                               AdderParities& parity) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    for (; steps > 0; --steps, parity.full ^= 1, parity.turn ^= 1) {
        wait_for(shared.dq_turn, parity.turn, kHalf);
        float* sum =
            launch.workspace.dq + (shared.dq_block * std::uint64_t{2} + unsigned{kHalf}) * (kBytes / sizeof(float));
        const bool first = shared.dq_first;
        ptx::fence_proxy_async_global();
        wait_for(shared.dq_full[kHalf], parity.full, kHalf);
        if (first) ptx::bulk_store(sum, shared.dq[kHalf], kBytes);
        else ptx::bulk_reduce_add(sum, shared.dq[kHalf], kBytes);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::mbarrier_arrive(shared.dq_added);
    }
}

/// One thread: whose turn it is to add to both halves of a block of dQ. It looks for the next turn while the last
/// addition is under way, and its fences, which take a fifth of a step, hold up nobody.
template <Config kConfig, Order kOrder>
__device__ __forceinline__ void keep_order(const Launch& launch, Shared<kConfig>& shared,
                                           const KeyBlock<kConfig>& block, AdderParities& parity) {
    const int group = block.blocks.share_heads;
    Steps<kOrder == Order::rising> step(block.blocks, block.n, group);
    if (!step.more()) return;
    const auto wait_for_turn = [&](const DqTurn& turn) {
        wait_until(turn.place, [&] { return turn.template has_come<0>(launch); });
    };
    const auto give = [&](const DqTurn& turn) {
        shared.dq_block = turn.block_q;
        shared.dq_first = turn.place == 0;
        ptx::mbarrier_arrive(shared.dq_turn);
    };
    DqTurn turn;
    turn.set<kOrder>(launch, block, step);
    wait_for_turn(turn);
    give(turn);
    while (true) {
        step.advance(group);
        const bool more = step.more();
        DqTurn next = turn;
        bool has_come = false;
        if (more) {
            next.set<kOrder>(launch, block, step);
            has_come = next.template has_come<0>(launch);
        }
        wait_for(shared.dq_added, parity.turn);
        parity.turn ^= 1;
        if (has_come) give(next);
        ptx::store_release(turn.template counter<0>(launch), turn.place + 1);
        if (!more) return;
        turn = next;
        if (!has_come) {
            wait_for_turn(turn);
            give(turn);
        }
    }
}

/// The same of a block of keys that is the last to add to some blocks of queries: brings their sum, so that the
/// consumers make dQ of it. dq_empty says that it is there, dq_full that it has been read. (Where one counter is kept
/// for both halves, such a block is the last of all of its steps: ends_with_first().)
template <Config kConfig, int kHalf>
__device__ __forceinline__ void add_or_bring_dq(const Launch& launch, Shared<kConfig>& shared,
                                                const KeyBlock<kConfig>& block, AdderParities& parity) {
    constexpr std::uint32_t kBytes = sizeof(shared.dq[0]);
    const int group = block.blocks.share_heads;
    Steps<false> step(block.blocks, block.n, group);
    while (step.more()) {
        DqTurn turn{};
        turn.set<Order::in_parts>(launch, block, step);
        float* sum =
            launch.workspace.dq + (turn.block_q * std::uint64_t{2} + unsigned{kHalf}) * (kBytes / sizeof(float));
        const bool last = turn.place + 1 == block.blocks.keys_of(step.m).end;
        const auto wait_for_turn = [&] {
            wait_until(turn.place,
                       [&] { return turn.template has_come < kConfig.order_kept() ? 0 : kHalf > (launch); });
            ptx::fence_proxy_async_global();
        };
        shared.dq_goes[kHalf] = !last ? DqGoes::to_sum : turn.place == 0 ? DqGoes::out_alone : DqGoes::out;
        if (last && turn.place > 0) {
            wait_for_turn();
            ptx::mbarrier_arrive_expect(shared.dq_empty[kHalf], kBytes);
            ptx::bulk_load(shared.dq[kHalf], sum, kBytes, shared.dq_empty[kHalf]);
        } else {
            ptx::mbarrier_arrive(shared.dq_empty[kHalf]);
        }
        wait_for(shared.dq_full[kHalf], parity.full, kHalf);
        parity.full ^= 1;
        step.advance(group);
        if (last) continue;
        wait_for_turn();
        if (turn.place == 0) ptx::bulk_store(sum, shared.dq[kHalf], kBytes);
        else ptx::bulk_reduce_add(sum, shared.dq[kHalf], kBytes);
        ptx::tma_store_commit();
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::store_release(turn.template counter < kConfig.order_kept() ? 0 : kHalf > (launch), turn.place + 1);
    }
}

/// What the producer's threads do for one block of keys. One if ... else if: with common code after a thread's loop,
/// the compiler keeps the other lanes of its warp waiting there, and turns come late.
template <Config kConfig, Order kOrder, bool kFinishes = false>
__device__ __forceinline__ void produce(const Launch& launch, Shared<kConfig>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    AdderParities parity;
    if (thread == 0) Loader<kConfig, kOrder == Order::rising>{launch, shared}.load_others();
    else if constexpr (kConfig.order_kept() && !kFinishes) {
        const int steps = Steps<false>(shared.block.blocks, shared.block.n, shared.block.blocks.share_heads).count();
        if (thread == 32) add_dq_in_turn<kConfig, 0>(launch, shared, steps, parity);
        else if (thread == 64) add_dq_in_turn<kConfig, 1>(launch, shared, steps, parity);
        else if (thread == 96) keep_order<kConfig, kOrder>(launch, shared, shared.block, parity);
    } else if constexpr (kFinishes) {
        if (thread == 32) add_or_bring_dq<kConfig, 0>(launch, shared, shared.block, parity);
        else if (thread == 64) add_or_bring_dq<kConfig, 1>(launch, shared, shared.block, parity);
    } else if constexpr (!kConfig.roles()) {
        if (thread == 32) add_dq<kConfig, 0, kOrder>(launch, shared);
        else if (thread == 64) add_dq<kConfig, 1, kOrder>(launch, shared);
    }
}

}  // namespace tessera::cuda::fa3::backward
