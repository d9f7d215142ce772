// SPDX-License-Identifier: Apache-2.0
//
// Runs first in a ragged call: lists its work on the device (fa3/host/key_block_list.hpp).
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/work_list.cuh"

namespace tessera::cuda::fa3::backward {

template <int kBlockQ, int kBlockKv>
__global__ void __launch_bounds__(kListThreads, 1) list_kernel(const __grid_constant__ Launch launch) {
    const ForwardParams& p = launch.params.forward;
    const Workspace& to = launch.workspace;
    const auto batch = static_cast<int>(p.batch);
    const Listing listing = list_sequences(p, to.list, launch.list_items, [&](const Sequence& sequence) -> ListedWork {
        BlockSchedule<kBlockQ, kBlockKv> schedule;
        schedule.set(p.mask, sequence.len_q, sequence.len_kv, p.group);
        return {.items = items_of(schedule),
                .parts = QueryParts(sequence.len_q, launch.part_queries * schedule.head_splits).count()};
    });
    set_counters(to.next_numbers, launch.parts, listing, p.heads_kv, launch.key_blocks.count);
    if (threadIdx.x == 0) {
        *to.state = CallState{.cu_seqlens_decreased = listing.decreases ? 1 : 0, .some_large = 0, .nonfinite_keys = 0};
    }
    if (listing.decreases) return;
    const auto first_block = [&](int b) {
        return static_cast<int>(
            first_block_q(p, kBlockQ, b, cu_seqlens_at(p.cu_seqlens_q, b * p.cu_stride_q, p.cu_q_is_64, p.total_q)));
    };
    for_each_listed(batch, [&](int b) {
        // The first sequence has the blocks in front of it, too, should cu_seqlens not begin at 0.
        const int first = b < batch ? first_block(b) : 0;
        const int begin = b == 0 ? 0 : first;
        const int end = b >= batch ? begin : b + 1 == batch ? launch.blocks_q : first_block(b + 1);
        write_range(
            end - begin,
            [&](int i, int sequence, int from, int m) {
                to.query_blocks[from + i] = {sequence, m + i};
            },
            b, begin, begin - first);
    });
}

template <int kBlockQ, int kBlockKv>
cudaError_t launch_list(const Launch& launch, cudaStream_t stream) {
    return start(list_kernel<kBlockQ, kBlockKv>, 1, kListThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
