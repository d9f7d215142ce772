// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/scores.cuh"
#include "cuda/standard/values.cuh"

template cudaError_t tessera::cuda::standard::start_scores<__half, tessera::cuda::standard::HeadDim256>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::standard::start_values<__half, tessera::cuda::standard::HeadDim256>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
