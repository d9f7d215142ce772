// SPDX-License-Identifier: Apache-2.0
//
// The gradient of the sinks, from RowStats.
#pragma once

#include "cuda/backward/sink_gradient.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3::backward {

template <int kBlockQ>
__global__ void __launch_bounds__(32 * kSinkWarps) sink_gradient_kernel(const __grid_constant__ Launch launch) {
    if (launch.workspace.state->cu_seqlens_decreased != 0) return;
    sum_sink_gradient(launch.params, [&](int batch, const Sequence& sequence, int query) {
        const std::int64_t block = std::int64_t{blockIdx.x} * launch.blocks_q +
                                   first_block_q(launch.params.forward, kBlockQ, batch, sequence.first_q) +
                                   query / kBlockQ;
        constexpr int kRows = Config::kRows;
        const RowStats& stats = launch.workspace.stats[block * (kBlockQ / kRows) + query % kBlockQ / kRows];
        return stats.delta[RowStats::slot(query % kRows)];
    });
}

template <int kBlockQ>
cudaError_t launch_sink_gradient(const Launch& launch, cudaStream_t stream) {
    return start(sink_gradient_kernel<kBlockQ>, launch.params.forward.heads_q, 32 * kSinkWarps, 0, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
