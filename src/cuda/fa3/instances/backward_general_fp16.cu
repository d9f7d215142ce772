// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/after/bias_gradient.cuh"
#include "cuda/fa3/backward/after/dkdv_reduce.cuh"
#include "cuda/fa3/backward/after/dq_convert.cuh"
#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/before/delta_from_output.cuh"
#include "cuda/fa3/backward/main/kernel.cuh"

namespace tessera::cuda::fa3::backward {

template cudaError_t launch_delta<__half, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_delta_from_output<__half, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_bias_gradient<__half, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_dq_convert<__half, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_dkdv_reduce<__half, HeadDim64General>(const Launch&, cudaStream_t);

template cudaError_t launch_delta<__half, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_delta_from_output<__half, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__half, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_bias_gradient<__half, HeadDim128General>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::fa3::backward
