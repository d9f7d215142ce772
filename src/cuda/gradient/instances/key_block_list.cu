// SPDX-License-Identifier: Apache-2.0
//
// Runs first in a ragged call: lists its key blocks on the device (cuda/host/work_list.hpp).
#include "cuda/gradient/main/cta_work.cuh"
#include "cuda/gradient/start.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/work_list.cuh"

namespace tessera::cuda::gradient {

__global__ void __launch_bounds__(kListThreads, 1) list_kernel(const __grid_constant__ ListLaunch list) {
    const Launch& launch = list.call;
    const ForwardParams& p = launch.params.forward;
    const Listing listing =
        list_sequences(p, launch.list, launch.list_items, [&](const Sequence& sequence) -> ListedWork {
            const Band band = p.mask.bind(sequence.len_q, sequence.len_kv);
            const int heads = heads_of_cta(launch, band);
            return {.items = SequenceBlocks(p.mask, band, p.group, heads, list.block_kv).items(),
                    .parts = QueryParts(sequence.len_q, QueryParts::fitting(heads, launch.max_terms)).count()};
        });
    set_counters(launch.next_cta, launch.query_parts, listing, p.heads_kv, static_cast<unsigned>(launch.ctas()));
}

cudaError_t start_list(const ListLaunch& launch, cudaStream_t stream) {
    return start(list_kernel, 1, kListThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
