// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include "cuda/gradient/place.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/tile/member.cuh"

namespace tessera::cuda::gradient {

/// What a thread block works on: a block of keys of one kv head, and the queries of its group that see one of them.
struct KeyWork {
    Member member;
    Band band;
    Visible visible;
    std::int64_t batch = 0;
    int kv_head = 0;
    int block = 0;
    int first_key = 0;
    Meeting own;
    Meeting next;  // of the block that adds to dQ before this one; meets nothing if there is none
    bool waits = true;
    bool guarded = false;  // the work is done again, and keeps what a query does not see away from the products

    KeyWork() = default;
    __device__ KeyWork(const Launch& launch, std::int64_t pair, int number, int block_kv) {
        const ForwardParams& p = launch.params.forward;
        batch = pair / p.heads_kv;
        kv_head = static_cast<int>(pair % p.heads_kv);
        member = member_of(p, batch);
        band = p.mask.bind(member.len_q, member.len_kv);
        visible = Visible(band);
        set_block(number, block_kv);
    }
    __device__ void set_block(int number, int block_kv) {
        guarded = false;
        block = number;
        first_key = number * block_kv;
        own = Meeting(band, number, block_kv);
        next = Meeting(band, number + 1, block_kv);
    }

    __device__ __forceinline__ bool exists() const { return first_key < member.len_kv; }
    __device__ __forceinline__ bool adds_dq(const Launch& launch) const {
        return !guarded && launch.params.dq.data != nullptr;
    }
};

/// Blocks of keys are dealt out in falling order, to thread blocks as they begin: one that has begun waits for none
/// that has not. For one thread; `memory`: of a KeyWork.
__device__ inline void take_ticket(void* memory, const Launch& launch, int block_kv) {
    const int ticket = atomicAdd(&launch.progress->ticket, 1);
    const int number = launch.key_blocks - 1 - ticket % launch.key_blocks;
    auto* const work = new (memory) KeyWork(launch, ticket / launch.key_blocks, number, block_kv);
    work->waits = launch.progress->broken == 0;
}

/// One step of the work: a head of the group, and a tile of its queries.
struct Step {
    int head;
    int tile;
    int sweep;

    __device__ __forceinline__ Step(int of_head, int of_tile, int in_sweep)
        : head(of_head), tile(of_tile), sweep(in_sweep) {}
    __device__ __forceinline__ Step(const Launch& launch, const KeyWork& work, int index) {
        const int count = work.own.count();
        const int place = index % count;
        head = work.kv_head * launch.params.forward.group + index / count;
        tile = work.own.tile(place);
        sweep = work.own.sweep(place);
    }
};

/// The order in which blocks of keys add to dQ of a tile of queries: falling. No block waits for one that may not have
/// begun, for blocks are dealt out in this order, too.
struct Turns {
    const Launch& launch;
    const KeyWork& work;

    __device__ __forceinline__ std::int64_t tile(const Step& step) const {
        return first_tile(launch, work.member, work.batch, step.head) + step.tile;
    }
    /// Of its sum in the workspace.
    __device__ __forceinline__ std::int64_t place(const Step& step) const {
        return step.sweep * launch.all_tiles() + tile(step);
    }
    __device__ __forceinline__ bool first_to_add(const Step& step) const {
        return !work.next.meets(step.sweep, step.tile);
    }

    /// The block's part is there: the next block may add its own. After a barrier of all threads, by one of them.
    __device__ __forceinline__ void publish(const Step& step) const {
        constexpr unsigned kPublisher = 32;  // of another warp than the one that waits
        if (threadIdx.x == kPublisher) ptx::store_release(launch.done + place(step), work.block + 1);
    }

    /// One thread waits for the block before; a barrier of all threads is to follow.
    __device__ __forceinline__ void wait(const Step& step) const {
        if (threadIdx.x != 0 || !work.waits || first_to_add(step)) return;
        while (ptx::load_acquire(launch.done + place(step)) != work.block + 2) {
        }
    }
};

}  // namespace tessera::cuda::gradient
