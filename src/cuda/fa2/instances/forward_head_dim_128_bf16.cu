// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/forward.cuh"

template cudaError_t tessera::cuda::fa2::start_forward<__nv_bfloat16, tessera::cuda::fa2::HeadDim128>(
    const tessera::cuda::fa2::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_forward<__nv_bfloat16, tessera::cuda::fa2::HeadDim128General>(
    const tessera::cuda::fa2::Launch&, cudaStream_t);
