// SPDX-License-Identifier: Apache-2.0
//
// Runs before a forward with a dynamic tile scheduler: sets up its queue.
#include "cuda/fa3/forward/launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/work_list.cuh"

namespace tessera::cuda::fa3 {

__global__ void reset_kernel(TileQueue* queue) {
    ptx::griddepcontrol_launch_dependents();
    queue->taken = 0;
}

/// Lists the tiles of the sequences of a ragged call.
__global__ void __launch_bounds__(kListThreads, 1) list_kernel(const __grid_constant__ Launch launch) {
    ptx::griddepcontrol_launch_dependents();
    const int capacity = launch.order.q_blocks();
    const Listing listing =
        list_sequences(launch.params, launch.list, capacity, [&](const Sequence& sequence) -> ListedWork {
            const int queries = launch.tile_queries.divisor();
            return {.items = launch.tile_queries.quotient(sequence.len_q + queries - 1), .parts = 1};
        });
    if (threadIdx.x == 0) *launch.queue = {.taken = 0, .items = capacity - listing.first_item};
}

cudaError_t start_queue(const Launch& launch, cudaStream_t stream) {
    if (launch.list == nullptr) return start(reset_kernel, 1, 1, 0, launch.queue, stream);
    return start(list_kernel, 1, kListThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3
