// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa1/forward.cuh"

template cudaError_t tessera::cuda::fa1::start_forward<__nv_bfloat16, tessera::cuda::fa1::HeadDim128>(
    const tessera::cuda::fa1::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa1::start_forward<__nv_bfloat16, tessera::cuda::fa1::HeadDim128General>(
    const tessera::cuda::fa1::Launch&, cudaStream_t);
