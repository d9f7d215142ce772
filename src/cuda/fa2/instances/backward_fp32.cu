// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/backward_fp32.cuh"

template cudaError_t tessera::cuda::fa2::start_backward_fp32<tessera::cuda::fa2::BackwardHeadDim256Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
