// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/backward.cuh"

template cudaError_t tessera::cuda::fa2::start_backward<__nv_bfloat16, tessera::cuda::fa2::BackwardHeadDim64>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_backward<__nv_bfloat16, tessera::cuda::fa2::BackwardHeadDim64General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
