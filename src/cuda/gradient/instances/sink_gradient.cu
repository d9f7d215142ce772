// SPDX-License-Identifier: Apache-2.0
//
// The gradient of the sinks, from RowTile.
#include "cuda/backward/sink_gradient.cuh"
#include "cuda/gradient/start.hpp"
#include "cuda/gradient/workspace.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::gradient {

__global__ void __launch_bounds__(32 * kSinkWarps) sink_gradient_kernel(const __grid_constant__ Launch launch) {
    sum_sink_gradient(launch.params, [&](int batch, const Sequence& sequence, int query) {
        const RowTile* tiles = launch.rows + first_tile(launch, sequence, batch, static_cast<int>(blockIdx.x));
        return tiles[query / kBlockQ].delta[query % kBlockQ];
    });
}

cudaError_t start_sink_gradient(const Launch& launch, cudaStream_t stream) {
    return start(sink_gradient_kernel, launch.params.forward.heads_q, 32 * kSinkWarps, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient
