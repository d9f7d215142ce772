// SPDX-License-Identifier: Apache-2.0
//
// The work of a CTA of the main kernel: its key block, and the order of its steps.
#pragma once

#include <new>

#include "cuda/gradient/host/dq_order.hpp"
#include "cuda/gradient/workspace.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

/// Query heads of a CTA: those of a group, or of a split of them.
__device__ __forceinline__ int heads_of_cta(const Launch& launch, const Band& band) {
    const int group = launch.params.forward.group;
    return launch.partial.max_splits > 1 ? HeadSplit::heads_per_split(band, group) : group;
}

/// A key block of one kv head, and the queries that see one of its keys: of all query heads of the group, or of one
/// split of them (HeadSplit).
struct CtaWork {
    Sequence sequence;
    Band band;
    Band32 band32;
    std::int64_t batch = 0;
    int kv_head = 0;
    int split = 0;
    int num_splits = 1;
    int first_head = 0;  // query heads
    int heads = 0;
    int first_key = 0;
    int query_tiles = 1;  // tiles of kBlockQ queries in a step's query tile, a power of two
    KeyBlockOrder order;
    QueryParts parts{0, 1};  // parts of the sequence's queries
    int part = 0;            // the part that the launch has
    bool waits = true;
    bool sanitizes = false;  // the work is done a second time, with Inf and NaN of Q and dO replaced by 0

    CtaWork() = default;
    __device__ CtaWork(const Launch& launch, int pair, int of_split = 0) : split(of_split) {
        const int of_batch = launch.kv_head_divider.quotient(pair);
        batch = of_batch;
        kv_head = pair - of_batch * launch.params.forward.heads_kv;
        sequence = sequence_of(launch.params.forward, batch);
        set_heads(launch);
    }
    /// A kv head and split of a ragged call's listed sequence.
    __device__ CtaWork(const Launch& launch, const ListedSequence& listed, int of_kv_head, int of_split)
        : sequence{listed.first_q, listed.first_kv, listed.len_q, listed.len_kv},
          batch(listed.batch),
          kv_head(of_kv_head),
          split(of_split) {
        set_heads(launch);
    }
    /// Sets what follows from the sequence, the kv head and the split.
    __device__ void set_heads(const Launch& launch) {
        const ForwardParams& p = launch.params.forward;
        band = p.mask.bind(sequence.len_q, sequence.len_kv);
        band32 = Band32(band);
        heads = heads_of_cta(launch, band);
        num_splits = HeadSplit::num_splits(heads, p.group);
        parts = QueryParts(sequence.len_q, QueryParts::fitting(heads, launch.max_terms));
        part = launch.part;
        first_head = kv_head * p.group + split * heads;
        heads = min(heads, (kv_head + 1) * p.group - first_head);
    }
    __device__ int log2_block_q() const { return __ffs(query_tiles * kBlockQ) - 1; }
    __device__ void set_block(int number, int block_kv) {
        sanitizes = false;
        first_key = number * block_kv;
        order.set(band, number, block_kv, log2_block_q());
        clamp_to_part();
    }
    /// The block that starts as number `started` of `segment`.
    __device__ void set_started(const Launch& launch, int segment, int started, int block_kv) {
        const int blocks = (sequence.len_kv + block_kv - 1) / block_kv;
        const bool segmented = launch.segments > 1 && is_causal_square(band) &&
                               may_use_segments(launch.params.forward.group, num_splits * blocks);
        sanitizes = false;
        order.set_started(band, segment, started, launch.segments, blocks, launch.key_blocks, segmented, block_kv,
                          log2_block_q());
        first_key = order.block * block_kv;
        clamp_to_part();
    }
    /// Key block `number` of a ragged call's sequence.
    __device__ void set_listed(int number, int blocks, bool segmented, int block_kv) {
        sanitizes = false;
        order.set_in_sequence(band, number, blocks, segmented, block_kv, log2_block_q());
        first_key = number * block_kv;
        clamp_to_part();
    }
    /// Prepares the second run, in which a step has one tile of kBlockQ queries.
    __device__ void start_over(int block_kv) {
        query_tiles = 1;
        set_block(order.block, block_kv);
        sanitizes = true;
    }

    __device__ __forceinline__ bool exists() const {
        return split < num_splits && first_key < sequence.len_kv && (part == 0 || parts.begin(part) < sequence.len_q);
    }
    /// Are dK and dV sums in the workspace first, over head splits or parts of the queries?
    __device__ __forceinline__ bool sums_in_workspace() const { return num_splits > 1 || !parts.is_one(); }
    /// Steps of the CTA: query tiles times query heads.
    __device__ __forceinline__ int steps() const { return order.own.count() * heads; }
    /// Does this run add to dQ? A second run does not add again.
    __device__ __forceinline__ bool adds_dq(const Launch& launch) const {
        return !sanitizes && launch.params.dq.data != nullptr;
    }

 private:
    __device__ void clamp_to_part() {
        if (parts.is_one()) return;
        const int log2 = log2_block_q();
        order.clamp(parts.begin(part) >> log2, (parts.begin(part + 1) + (1 << log2) - 1) >> log2);
    }
};

/// The key block of a number of a ragged call's list. Past the last number there is none.
__device__ inline void set_listed_work(void* memory, const Launch& launch, int number, int block_kv, int query_tiles) {
    if (number >= static_cast<int>(launch.ctas())) {
        new (memory) CtaWork();
        return;
    }
    const ForwardParams& p = launch.params.forward;
    const ListedSequence listed = launch.list[launch.kv_head_divider.quotient(number)];
    const int index = number - listed.first_item * p.heads_kv;
    const Band band = p.mask.bind(listed.len_q, listed.len_kv);
    const SequenceBlocks blocks(p.mask, band, p.group, heads_of_cta(launch, band), block_kv);
    const PlacedKeyBlock placed = blocks.place(index, p.heads_kv);
    const int kv_head = placed.head / blocks.splits;
    auto* const work = new (memory) CtaWork(launch, listed, kv_head, placed.head - kv_head * blocks.splits);
    work->query_tiles = query_tiles;
    work->set_listed(placed.n, blocks.count, blocks.segmented, block_kv);
}

/// Takes the next key block from the launch's counter (host/dq_order.hpp has the order). One thread calls it;
/// `memory` has room for a CtaWork.
__device__ inline void take_key_block(void* memory, const Launch& launch, int block_kv, int query_tiles = 1) {
    const int number = atomicAdd(launch.next_cta, 1);
    if (launch.list != nullptr) return set_listed_work(memory, launch, number, block_kv, query_tiles);
    const int run = launch.block_divider.quotient(number);  // counts (segment, head, split)
    const int segment = launch.segment_divider.quotient(run);
    const int head_and_split = run - segment * launch.segment_divider.divisor();
    const int pair = launch.split_divider.quotient(head_and_split);
    auto* const work = new (memory) CtaWork(launch, pair, head_and_split - pair * launch.split_divider.divisor());
    work->query_tiles = query_tiles;
    work->set_started(launch, segment, number - run * launch.block_divider.divisor(), block_kv);
}

/// One step: a query head of the group, one of its query tiles, and the dQ accumulator that the CTA adds to.
struct Step {
    int head;
    int tile;  // index of the query tile, which has CtaWork::query_tiles * kBlockQ queries
    int accumulator;

    __device__ __forceinline__ Step(int of_head, int of_tile, int to_accumulator)
        : head(of_head), tile(of_tile), accumulator(to_accumulator) {}
    __device__ __forceinline__ Step(const Launch& launch, const CtaWork& work, int index) {
        const int count = work.order.own.count();
        const int visit = index % count;
        head = work.first_head + index / count;
        tile = work.order.own.query_block_of(visit);
        accumulator = work.order.own.accumulator_of(visit);
    }
};

/// The semaphores of dQ, one word for each accumulator of a tile of kBlockQ queries: the number of the key block that
/// has added last, plus 1; 0 before any has.
struct DqSemaphore {
    const Launch& launch;
    const CtaWork& work;
    static constexpr unsigned kReleasingThread = 32;  // in another warp than the thread that acquires

    /// The step's first tile of kBlockQ queries in the workspace.
    __device__ __forceinline__ std::int64_t tile(const Step& step) const {
        return first_tile(launch, work.sequence, work.batch, step.head) + step.tile * work.query_tiles;
    }
    /// The accumulator of that tile, and its semaphore.
    __device__ __forceinline__ std::int64_t index(const Step& step) const {
        return step.accumulator * launch.all_tiles() + tile(step);
    }
    /// The key block that adds before this one; -1: none.
    __device__ __forceinline__ int predecessor(const Step& step) const {
        return work.order.predecessor(step.accumulator, step.tile);
    }
    __device__ __forceinline__ bool is_first(const Step& step) const { return predecessor(step) < 0; }

    /// Lets the next key block add. One thread acts, after a barrier after the additions of all threads.
    __device__ __forceinline__ void release(const Step& step) const {
        if (threadIdx.x == kReleasingThread) {
            ptx::store_release(launch.dq_semaphores + index(step), work.order.block + 1);
        }
    }
    /// Waits for the predecessor. One thread acts; a barrier of all threads has to follow.
    __device__ __forceinline__ void acquire(const Step& step) const {
        if (threadIdx.x != 0 || !work.waits) return;
        const int predecessor = this->predecessor(step);
        if (predecessor < 0) return;
        while (ptx::load_acquire(launch.dq_semaphores + index(step)) != predecessor + 1) {
        }
    }
};

}  // namespace tessera::cuda::gradient
