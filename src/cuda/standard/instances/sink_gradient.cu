// SPDX-License-Identifier: Apache-2.0
//
// The gradient of the sinks, from the delta that the row kernel has stored.
#include "cuda/backward/sink_gradient.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/standard/launch.hpp"

namespace tessera::cuda::standard {

__global__ void __launch_bounds__(32 * kSinkWarps) sink_gradient_kernel(const __grid_constant__ SinkLaunch launch) {
    sum_sink_gradient(launch.params, [&](int batch, const Sequence& sequence, int query) {
        const ForwardParams& p = launch.params.forward;
        const std::int64_t first = p.cu_seqlens_q != nullptr ? sequence.first_q : std::int64_t{batch} * p.len_q;
        return launch.delta[blockIdx.x * launch.rows + first + query];
    });
}

cudaError_t start_sink_gradient(const SinkLaunch& launch, cudaStream_t stream) {
    return start(sink_gradient_kernel, launch.params.forward.heads_q, 32 * kSinkWarps, 0, launch, stream);
}

}  // namespace tessera::cuda::standard
