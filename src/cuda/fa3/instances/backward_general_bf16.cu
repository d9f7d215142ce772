// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/after/bias_gradient.cuh"
#include "cuda/fa3/backward/after/dkdv_reduce.cuh"
#include "cuda/fa3/backward/after/dq_convert.cuh"
#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/before/delta_from_output.cuh"
#include "cuda/fa3/backward/main/kernel.cuh"

namespace tessera::cuda::fa3::backward {

template cudaError_t launch_delta<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_delta_from_output<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_bias_gradient<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_dq_convert<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);
template cudaError_t launch_dkdv_reduce<__nv_bfloat16, HeadDim64General>(const Launch&, cudaStream_t);

template cudaError_t launch_delta<__nv_bfloat16, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_delta_from_output<__nv_bfloat16, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, HeadDim128General>(const Launch&, cudaStream_t);
template cudaError_t launch_bias_gradient<__nv_bfloat16, HeadDim128General>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::fa3::backward
