// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa1/backward.cuh"

template cudaError_t tessera::cuda::fa1::start_backward<__half, tessera::cuda::fa1::BackwardHeadDim64>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
