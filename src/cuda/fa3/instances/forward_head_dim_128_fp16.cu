// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/forward/kernel.cuh"

template cudaError_t tessera::cuda::fa3::start_forward<__half, tessera::cuda::fa3::HeadDim128>(
    const tessera::cuda::fa3::Launch&, int, cudaStream_t);
template cudaError_t tessera::cuda::fa3::start_forward<__half, tessera::cuda::fa3::HeadDim128Small>(
    const tessera::cuda::fa3::Launch&, int, cudaStream_t);
