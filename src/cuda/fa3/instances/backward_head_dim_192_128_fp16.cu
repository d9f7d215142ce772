// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/backward.cuh"
#include "cuda/fa3/backward/delta.cuh"
#include "cuda/fa3/backward/delta_of_output.cuh"
#include "cuda/fa3/backward/dq_product.cuh"
#include "cuda/fa3/backward/shares.cuh"

template cudaError_t tessera::cuda::fa3::backward::start_delta<__half, tessera::cuda::fa3::backward::HeadDim192V128>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_delta_of_output<
    __half, tessera::cuda::fa3::backward::HeadDim192V128>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_backward<__half, tessera::cuda::fa3::backward::HeadDim192V128>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_dq_product<
    __half, tessera::cuda::fa3::backward::HeadDim192V128>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_shares<__half, tessera::cuda::fa3::backward::HeadDim192V128>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
