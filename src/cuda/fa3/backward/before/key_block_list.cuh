// SPDX-License-Identifier: Apache-2.0
//
// Runs first in a ragged call: lists its work on the device (fa3/host/key_block_list.hpp). One CTA; a thread has a
// sequence at a time.
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/key_block_list.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kListThreads = 1024;

/// A warp: each lane calls write(lane's arguments, i) for i in [0, its count). Long ranges are written by all lanes.
template <class Write, class... Arguments>
__device__ __forceinline__ void write_range(int count, const Write& write, Arguments... arguments) {
    constexpr int kFew = 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (count <= kFew) {
        for (int i = 0; i < count; ++i) write(i, arguments...);
    }
    for (unsigned left = __ballot_sync(kAllLanes, count > kFew); left != 0; left &= left - 1) {
        const int of = __ffs(static_cast<int>(left)) - 1;
        const int all = __shfl_sync(kAllLanes, count, of);
        const auto write_of = [&](auto... own) {
            for (int i = lane; i < all; i += 32) write(i, own...);
        };
        write_of(__shfl_sync(kAllLanes, arguments, of)...);
    }
}

/// Turns the items of each class into the first item of the class, from the longest to the shortest; the last item is
/// `end` - 1. Called by one warp; returns the first item of all.
__device__ __forceinline__ int start_classes(int (&items)[kLengthClasses], int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int begin = end;
    for (int first = 0; first < kLengthClasses; first += 32) {
        const bool exists = first + lane < kLengthClasses;
        int sum = exists ? items[first + lane] : 0;  // of this class and the shorter ones of these 32
        for (int distance = 1; distance < 32; distance *= 2) {
            const int shorter = __shfl_up_sync(kAllLanes, sum, distance);
            if (lane >= distance) sum += shorter;
        }
        if (exists) items[first + lane] = begin - sum;
        begin -= __shfl_sync(kAllLanes, sum, 31);
    }
    return begin;
}

/// Do the keys of this sequence begin past their end?
__device__ __forceinline__ bool keys_decrease(const ForwardParams& p, std::int64_t batch) {
    return cu_seqlens_at(p.cu_seqlens_kv, (batch + 1) * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv) <
           cu_seqlens_at(p.cu_seqlens_kv, batch * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv);
}

template <int kBlockQ, int kBlockKv>
__global__ void __launch_bounds__(kListThreads, 1) list_kernel(const __grid_constant__ Launch launch) {
    __shared__ int class_items[kLengthClasses];  // then the next item of each class
    __shared__ int decrease, parts, first_item;
    const ForwardParams& p = launch.params.forward;
    const Workspace& to = launch.workspace;
    const auto batch = static_cast<int>(p.batch);
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < kLengthClasses; i += kListThreads) class_items[i] = 0;
    if (thread == 0) decrease = 0, parts = 1;
    __syncthreads();
    for (int b = thread; b < batch; b += kListThreads) {
        const Sequence sequence = sequence_of(p, b);
        BlockSchedule<kBlockQ, kBlockKv> schedule;
        schedule.set(p.mask, sequence.len_q, sequence.len_kv, p.group);
        atomicAdd(&class_items[length_class(sequence.len_q, sequence.len_kv)], items_of(schedule));
        const int own_parts = QueryParts(sequence.len_q, launch.part_queries * schedule.head_splits).count();
        if (own_parts > 1) atomicMax(&parts, own_parts);
        if (cu_seqlens_decrease(p, b) || keys_decrease(p, b)) decrease = 1;
    }
    __syncthreads();
    if (thread < 32) {
        const int first = start_classes(class_items, launch.list_items);
        if (thread == 0) first_item = first;
    }
    __syncthreads();
    // Offsets that decrease have more items than there is room for.
    const unsigned first_number =
        decrease != 0 ? launch.key_blocks.count : static_cast<unsigned>(first_item) * static_cast<unsigned>(p.heads_kv);
    if (thread == 0) *to.state = CallState{.cu_seqlens_decreased = decrease, .some_large = 0, .nonfinite_keys = 0};
    for (int part = thread; part < launch.parts; part += kListThreads) {
        to.next_numbers[part] = part < parts ? first_number : launch.key_blocks.count;
    }
    if (decrease != 0) return;
    for (int first = thread / 32 * 32; first < batch; first += kListThreads) {
        const int b = first + thread % 32;
        ListedSequence own{};
        int items = 0, first_block = 0, end_block = 0;
        if (b < batch) {
            const Sequence sequence = sequence_of(p, b);
            BlockSchedule<kBlockQ, kBlockKv> schedule;
            schedule.set(p.mask, sequence.len_q, sequence.len_kv, p.group);
            items = items_of(schedule);
            own = {.batch = b,
                   .first_item = atomicAdd(&class_items[length_class(sequence.len_q, sequence.len_kv)], items),
                   .first_q = static_cast<int>(sequence.first_q),
                   .first_kv = static_cast<int>(sequence.first_kv),
                   .len_q = sequence.len_q,
                   .len_kv = sequence.len_kv};
            first_block = static_cast<int>(first_block_q(p, kBlockQ, b, sequence.first_q));
            end_block = launch.blocks_q;
            if (b + 1 < batch) {
                end_block = static_cast<int>(
                    first_block_q(p, kBlockQ, b + 1,
                                  cu_seqlens_at(p.cu_seqlens_q, (b + 1) * p.cu_stride_q, p.cu_q_is_64, p.total_q)));
            }
        }
        write_range(
            items,
            [&](int i, int sequence, int item, int first_q, int first_kv, int len_q, int len_kv) {
                to.list[item + i] = {sequence, item, first_q, first_kv, len_q, len_kv, {}};
            },
            own.batch, own.first_item, own.first_q, own.first_kv, own.len_q, own.len_kv);
        // The first sequence has the blocks in front of it, too, should cu_seqlens not begin at 0.
        const int begin_block = b == 0 ? 0 : first_block;
        write_range(
            end_block - begin_block,
            [&](int i, int sequence, int begin, int m) {
                to.query_blocks[begin + i] = {sequence, m + i};
            },
            b, begin_block, begin_block - first_block);
    }
}

template <int kBlockQ, int kBlockKv>
cudaError_t launch_list(const Launch& launch, cudaStream_t stream) {
    return start(list_kernel<kBlockQ, kBlockKv>, 1, kListThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
