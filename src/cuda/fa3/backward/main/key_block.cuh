// SPDX-License-Identifier: Apache-2.0
//
// The key block that a CTA works on, decoded from its number.
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

template <Config kConfig>
struct KeyBlock {
    ScheduleOf<kConfig> schedule;
    int batch, kv_head, n;
    int segment, index;               ///< KeyBlockNumber's; ragged: `index` is that of the number in its sequence
    int split;                        ///< index of the head split (dq_order.hpp)
    int end_head;                     ///< one past the split's last query head
    int zeroed_do;                    ///< not 0: NaN or infinities may have been taken out of dO
    float ds_factor;                  ///< fp16: the scale of dS over that of P (common/fp16_scale.cuh)
    bool writes_dq;                   ///< it is the last to add to some query blocks, and writes their dQ
    int segment_begin, segment_last;  ///< first and last key block of n's segment
    int first_q, first_kv;            ///< rows where a ragged sequence begins
    int first_block_q;                ///< query blocks before the sequence's first one
    /// Query blocks that see all keys of a warpgroup. If its scores lack some keys (ConsumerThread::lacks_keys), the
    /// end is stored as its complement, which is negative.
    Span unmasked[Config::kConsumers];

    /// Sets which keys the block has. set_derived() sets the other members, after the first loads have been started.
    __device__ __forceinline__ void decode(const Launch& launch, unsigned number) {
        if (number >= launch.key_blocks.count) n = schedule.count_kv = 0;
        else if (launch.params.forward.cu_seqlens_q != nullptr) decode_listed(launch, number);
        else decode_dense(launch, number);
    }
    /// The block of a number of a ragged call's list.
    __device__ __forceinline__ void decode_listed(const Launch& launch, unsigned number) {
        const ForwardParams& p = launch.params.forward;
        const auto own = static_cast<int>(number);
        const int item = launch.key_blocks.by_listed_heads.quotient(own);
        const ListedSequence sequence = launch.workspace.list[item];
        batch = sequence.batch;
        index = own - sequence.first_item * p.heads_kv;
        first_q = sequence.first_q;
        first_kv = sequence.first_kv;
        first_block_q = static_cast<int>(backward::first_block_q(p, kConfig.block_q, batch, sequence.first_q));
        schedule.set(p.mask, sequence.len_q, sequence.len_kv, p.group);
        schedule.set_part(launch.part, launch.part_queries);
        const PlacedKeyBlock placed = place_key_block(schedule, p.heads_kv * schedule.head_splits, index,
                                                      !p.mask.trivial(), kConfig.splits_dv_dk());
        n = placed.n;
        kv_head = placed.head / schedule.head_splits;
        split = placed.head - kv_head * schedule.head_splits;
        end_head = kv_head * p.group + (split + 1) * schedule.heads_per_split;
        if (schedule.is_past_last_part()) n = schedule.count_kv;
    }
    __device__ __forceinline__ void decode_dense(const Launch& launch, unsigned number) {
        const ForwardParams& p = launch.params.forward;
        const KeyBlockNumber key_block = launch.key_blocks.decode(number);
        segment = key_block.segment;
        index = key_block.index;
        batch = key_block.batch;
        kv_head = key_block.kv_head;
        split = key_block.split;
        first_q = first_kv = 0;
        first_block_q = static_cast<int>(backward::first_block_q(p, kConfig.block_q, batch, 0));
        static_cast<SequenceSchedule&>(schedule) = launch.schedule;
        schedule.set_part(launch.part, launch.part_queries);
        end_head = kv_head * p.group + (split + 1) * schedule.heads_per_split;
        // If dQ has a kernel of its own, no CTA waits for another one, and n is in launch order.
        if constexpr (kConfig.splits_dv_dk()) n = segment * launch.key_blocks.segment_size + index;
        else n = schedule.key_block(segment, index, launch.key_blocks.segments, launch.key_blocks.segment_size);
        if (split >= schedule.head_splits || schedule.is_past_last_part()) n = schedule.count_kv;
    }
    template <class T>
    __device__ __forceinline__ void set_derived(const Launch& launch) {
        zeroed_do = 0;
        segment_begin = schedule.segment_begin(n);
        writes_dq = launch.gradients.writes_dq && n == segment_begin;
        segment_last = schedule.segment_last(n);
        for (int w = 0; w < Config::kConsumers; ++w) {
            unmasked[w] = schedule.unmasked_query_blocks(n * kConfig.block_kv + kConfig.first_row(w), Config::kRows);
        }
        if constexpr (kFp16Scaled<T>) ds_factor = ds_scale<T>(launch, batch, kv_head, split) / kPScale<T>;
    }
    /// Does query block m see all keys of the warpgroup?
    __device__ __forceinline__ bool is_unmasked(int warpgroup, int m) const {
        const Span& of_warpgroup = unmasked[warpgroup];
        return m >= of_warpgroup.begin && m < (of_warpgroup.end ^ of_warpgroup.end >> 31);
    }
    __device__ __forceinline__ bool exists() const { return n < schedule.count_kv; }
    /// The index of block m of a query head among all query blocks.
    __device__ __forceinline__ std::int64_t block_q(const Launch& launch, int head, int m) const {
        return std::int64_t{head} * launch.blocks_q + first_block_q + m;
    }
};

}  // namespace tessera::cuda::fa3::backward
