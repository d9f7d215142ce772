// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/after/dkdv_reduce.cuh"
#include "cuda/fa3/backward/after/dq_kernel.cuh"
#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/before/delta_from_output.cuh"
#include "cuda/fa3/backward/main/kernel.cuh"

template cudaError_t tessera::cuda::fa3::backward::start_delta<__half, tessera::cuda::fa3::backward::HeadDim192>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_delta_of_output<
    __half, tessera::cuda::fa3::backward::HeadDim192>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_backward<__half, tessera::cuda::fa3::backward::HeadDim192>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_dq_product<__half, tessera::cuda::fa3::backward::HeadDim192>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_shares<__half, tessera::cuda::fa3::backward::HeadDim192>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
