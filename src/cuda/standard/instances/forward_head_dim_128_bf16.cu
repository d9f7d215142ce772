// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/scores.cuh"
#include "cuda/standard/values.cuh"

template cudaError_t tessera::cuda::standard::start_scores<__nv_bfloat16, tessera::cuda::standard::HeadDim128>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::standard::start_values<__nv_bfloat16, tessera::cuda::standard::HeadDim128>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
