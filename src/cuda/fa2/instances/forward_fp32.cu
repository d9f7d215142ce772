// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/forward_fp32.cuh"

template cudaError_t tessera::cuda::fa2::start_forward_fp32<tessera::cuda::fa2::HeadDim64Fp32>(
    const tessera::cuda::fa2::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_forward_fp32<tessera::cuda::fa2::HeadDim128Fp32>(
    const tessera::cuda::fa2::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_forward_fp32<tessera::cuda::fa2::HeadDim256Fp32>(
    const tessera::cuda::fa2::Launch&, cudaStream_t);
