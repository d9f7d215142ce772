// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/after/sink_gradient.cuh"

namespace tessera::cuda::fa3::backward {

template cudaError_t launch_sink_gradient<64>(const Launch&, cudaStream_t);
template cudaError_t launch_sink_gradient<128>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::fa3::backward
