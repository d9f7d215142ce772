// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/before/delta_from_output.cuh"
#include "cuda/fa3/backward/main/kernel.cuh"

namespace tessera::cuda::fa3::backward {

template cudaError_t launch_delta<__half, HeadDim64Dropout>(const Launch&, cudaStream_t);
template cudaError_t launch_delta_from_output<__half, HeadDim64Dropout>(const Launch&, cudaStream_t);

template cudaError_t launch_backward<__half, HeadDim64Capped>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim64Alibi>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim64Dropout>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim128Capped>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim128Alibi>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim128Dropout>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::fa3::backward
