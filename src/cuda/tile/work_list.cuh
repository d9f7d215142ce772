// SPDX-License-Identifier: Apache-2.0
//
// Makes the list of a ragged call (cuda/host/work_list.hpp). One CTA; a thread has a sequence at a time.
#pragma once

#include "cuda/host/work_list.hpp"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda {

inline constexpr int kListThreads = 1024;

/// A sequence's part of the list.
struct ListedWork {
    int items;
    int parts;  ///< parts of its queries (cuda/host/query_parts.hpp)
};

/// The list of a call.
struct Listing {
    int first_item;  ///< the capacity of the list if it has none
    int parts;       ///< the most of any sequence
    bool decreases;  ///< cu_seqlens decrease: sequences overlap, and nothing is listed
};

/// A warp: each lane calls write(i, its arguments) for i in [0, its count). Long ranges are written by all lanes.
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

/// Calls f(sequence index) for all lanes of a warp together; the index may be past the last sequence.
template <class F>
__device__ __forceinline__ void for_each_listed(int batch, const F& f) {
    const auto thread = static_cast<int>(threadIdx.x);
    for (int first = thread / 32 * 32; first < batch; first += kListThreads) f(first + thread % 32);
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

/// All threads: lists the sequences. `capacity`: the most items of the list. work(sequence) returns the ListedWork of a
/// Sequence. The order within a class depends on the run; no bit does.
template <class Work>
__device__ __forceinline__ Listing list_sequences(const ForwardParams& p, ListedSequence* list, int capacity,
                                                  const Work& work) {
    __shared__ int class_items[kLengthClasses];  // then the next item of each class
    __shared__ int decreases, parts, first_item;
    const auto batch = static_cast<int>(p.batch);
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < kLengthClasses; i += kListThreads) class_items[i] = 0;
    if (thread == 0) decreases = 0, parts = 1;
    __syncthreads();
    for (int b = thread; b < batch; b += kListThreads) {
        const Sequence sequence = sequence_of(p, b);
        const ListedWork own = work(sequence);
        atomicAdd(&class_items[length_class(sequence.len_q, sequence.len_kv)], own.items);
        if (own.parts > 1) atomicMax(&parts, own.parts);
        if (cu_seqlens_decrease(p, b) || keys_decrease(p, b)) decreases = 1;
    }
    __syncthreads();
    if (thread < 32) {
        const int first = start_classes(class_items, capacity);
        if (thread == 0) first_item = first;
    }
    __syncthreads();
    // Sequences whose offsets decrease can have more items than the capacity.
    if (decreases != 0) return {capacity, parts, true};
    for_each_listed(batch, [&](int b) {
        ListedSequence own{};
        int items = 0;
        if (b < batch) {
            const Sequence sequence = sequence_of(p, b);
            items = work(sequence).items;
            own = {.batch = b,
                   .first_item = atomicAdd(&class_items[length_class(sequence.len_q, sequence.len_kv)], items),
                   .first_q = static_cast<int>(sequence.first_q),
                   .first_kv = static_cast<int>(sequence.first_kv),
                   .len_q = sequence.len_q,
                   .len_kv = sequence.len_kv};
        }
        write_range(
            items,
            [&](int i, int of_batch, int item, int first_q, int first_kv, int len_q, int len_kv) {
                list[item + i] = {of_batch, item, first_q, first_kv, len_q, len_kv, {}};
            },
            own.batch, own.first_item, own.first_q, own.first_kv, own.len_q, own.len_kv);
    });
    return {first_item, parts, false};
}

/// All threads: sets the counters from which the launches of the main kernel draw their numbers, one for each part of
/// the queries. `end`: of the numbers. A part that no sequence has gets none.
template <class Number>
__device__ __forceinline__ void set_counters(Number* next_numbers, int parts, const Listing& listing, int heads_kv,
                                             unsigned end) {
    const unsigned first = listing.decreases ? end : static_cast<unsigned>(listing.first_item) * heads_kv;
    for (int part = static_cast<int>(threadIdx.x); part < parts; part += kListThreads) {
        next_numbers[part] = static_cast<Number>(part < listing.parts ? first : end);
    }
}

}  // namespace tessera::cuda
