// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/after/dkdv_reduce.cuh"
#include "cuda/fa3/backward/after/dq_convert.cuh"
#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/before/delta_from_output.cuh"
#include "cuda/fa3/backward/main/kernel.cuh"

template cudaError_t tessera::cuda::fa3::backward::start_delta<__nv_bfloat16, tessera::cuda::fa3::backward::HeadDim128>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_delta_of_output<
    __nv_bfloat16, tessera::cuda::fa3::backward::HeadDim128>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_backward<
    __nv_bfloat16, tessera::cuda::fa3::backward::HeadDim128>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_dq<__nv_bfloat16, tessera::cuda::fa3::backward::HeadDim128>(
    const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa3::backward::start_shares<
    __nv_bfloat16, tessera::cuda::fa3::backward::HeadDim128>(const tessera::cuda::fa3::backward::Launch&, cudaStream_t);
