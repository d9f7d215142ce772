// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/backward_fp32.cuh"

template cudaError_t tessera::cuda::fa2::start_backward_parts<tessera::cuda::fa2::BackwardHeadDim64Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_backward_parts<tessera::cuda::fa2::BackwardHeadDim64Fp32Small>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_backward_parts<tessera::cuda::fa2::BackwardHeadDim128Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
