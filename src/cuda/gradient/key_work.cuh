// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include "cuda/gradient/place.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

/// What a thread block works on: a block of keys of one kv head, and the queries of its group that see one of them; or
/// of a share of the group (ShareRule).
struct KeyWork {
    Sequence sequence;
    Band band;
    Visible visible;
    std::int64_t batch = 0;
    int kv_head = 0;
    int share = 0;
    int shares = 1;
    int first_head = 0;  // query heads
    int heads = 0;
    int block = 0;
    int first_key = 0;
    int query_tiles = 1;  // of kBlockQ queries, in a tile of what follows
    Meeting own;
    Meeting next;         // of the block that adds to dQ before this one; meets nothing if there is none
    int earlier = -1;     // where `next` does not meet a tile, this block has added before; -1: none has
    bool parted = false;  // the blocks start in parts
    bool waits = true;
    bool guarded = false;  // the work is done again, and keeps what a query does not see away from the products

    KeyWork() = default;
    __device__ KeyWork(const Launch& launch, int pair, int of_share = 0) : share(of_share) {
        const ForwardParams& p = launch.params.forward;
        const int of_batch = launch.by_heads.quotient(pair);
        batch = of_batch;
        kv_head = pair - of_batch * p.heads_kv;
        sequence = sequence_of(p, batch);
        band = p.mask.bind(sequence.len_q, sequence.len_kv);
        visible = Visible(band);
        heads = p.group;
        if (launch.shares.most > 1) {
            heads = ShareRule::heads(band, p.heads_kv, p.group);
            shares = ShareRule::count(heads, p.group);
        }
        first_head = kv_head * p.group + share * heads;
        heads = min(heads, (kv_head + 1) * p.group - first_head);
    }
    __device__ void set_block(int number, int block_kv) {
        guarded = false;
        block = number;
        first_key = number * block_kv;
        own = Meeting(band, number, block_kv, query_tiles * kBlockQ);
        next = Meeting(band, number + 1, block_kv, query_tiles * kBlockQ);
    }
    /// The block that is number `started` of `part` to start of a head that has at most as many blocks as the launch
    /// says.
    __device__ void set_block(const Launch& launch, int part, int started, int block_kv) {
        const int blocks = (sequence.len_kv + block_kv - 1) / block_kv;
        const int size = launch.part_size(blocks);
        parted = launch.parts > 1 && ShareRule::triangle(band) &&
                 launch.params.forward.heads_kv * shares * blocks >= kFewestInParts;
        const int first = (parted ? part : launch.parts - 1 - part) * size;
        const int place = launch.part_size(launch.key_blocks) - 1 - started;
        set_block(place < size ? first + place : blocks, block_kv);
        if (!parted) return;
        if (place == size - 1) next = Meeting();
        if (part > 0) earlier = first - size;
    }

    /// The work is done again, a tile at a time.
    __device__ void guard(int block_kv) {
        query_tiles = 1;
        set_block(block, block_kv);
        guarded = true;
    }

    __device__ __forceinline__ bool exists() const { return share < shares && first_key < sequence.len_kv; }
    __device__ __forceinline__ bool adds_dq(const Launch& launch) const {
        return !guarded && launch.params.dq.data != nullptr;
    }
};

/// Blocks of keys are dealt out to thread blocks as they begin: those of a part in falling order, the parts of all
/// heads before the next part of any. One that has begun waits for none that has not. For one thread; `memory`: of a
/// KeyWork.
__device__ inline void take_ticket(void* memory, const Launch& launch, int block_kv, int query_tiles = 1) {
    const bool broken = launch.progress->broken != 0;  // asked for before the number comes
    const int ticket = atomicAdd(&launch.progress->ticket, 1);
    const int run = launch.by_blocks.quotient(ticket);  // the part of a share of a head
    const int part = launch.by_shares.quotient(run);
    const int place = run - part * launch.by_shares.divisor();
    const int pair = launch.by_share.quotient(place);
    auto* const work = new (memory) KeyWork(launch, pair, place - pair * launch.by_share.divisor());
    work->query_tiles = query_tiles;
    work->set_block(launch, part, ticket - run * launch.by_blocks.divisor(), block_kv);
    work->waits = !broken;
}

/// One step of the work: a head of the group, and a tile of its queries (of KeyWork::query_tiles).
struct Step {
    int head;
    int tile;
    int sweep;

    __device__ __forceinline__ Step(int of_head, int of_tile, int in_sweep)
        : head(of_head), tile(of_tile), sweep(in_sweep) {}
    __device__ __forceinline__ Step(const Launch& launch, const KeyWork& work, int index) {
        const int count = work.own.count();
        const int place = index % count;
        head = work.first_head + index / count;
        tile = work.own.tile(place);
        sweep = work.own.sweep(place);
    }
};

/// The order in which blocks of keys add to dQ of a tile of queries: falling, or falling in each part, and the parts
/// rising. No block waits for one that may not have begun, for blocks are dealt out in this order, too.
struct Turns {
    const Launch& launch;
    const KeyWork& work;
    static constexpr unsigned kPublisher = 32;  // a thread of another warp than the one that waits

    /// The first one of a step.
    __device__ __forceinline__ std::int64_t tile(const Step& step) const {
        return first_tile(launch, work.sequence, work.batch, step.head) + step.tile * work.query_tiles;
    }
    /// Of its sum in the workspace.
    __device__ __forceinline__ std::int64_t place(const Step& step) const {
        return step.sweep * launch.all_tiles() + tile(step);
    }
    /// The block that adds before this one; -1: none.
    __device__ __forceinline__ int before(const Step& step) const {
        return work.next.meets(step.sweep, step.tile) ? work.block + 1 : work.earlier;
    }
    __device__ __forceinline__ bool first_to_add(const Step& step) const { return before(step) < 0; }

    /// The block's part is there: the next block may add its own. After a barrier of all threads, by one of them.
    __device__ __forceinline__ void publish(const Step& step) const {
        if (threadIdx.x == kPublisher) ptx::store_release(launch.done + place(step), work.block + 1);
    }

    /// One thread waits for the block before; a barrier of all threads is to follow.
    __device__ __forceinline__ void wait(const Step& step) const {
        if (threadIdx.x != 0 || !work.waits) return;
        const int before = this->before(step);
        if (before < 0) return;
        while (ptx::load_acquire(launch.done + place(step)) != before + 1) {
        }
    }
};

}  // namespace tessera::cuda::gradient
