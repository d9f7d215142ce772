// SPDX-License-Identifier: Apache-2.0
#include "cuda/gradient/after/bias.cuh"
#include "cuda/gradient/after/dkdv_reduce.cuh"
#include "cuda/gradient/after/dq_convert.cuh"
#include "cuda/gradient/before/delta.cuh"
#include "cuda/gradient/before/delta_from_output.cuh"
#include "cuda/gradient/before/fp16_scale.cuh"

template cudaError_t tessera::cuda::gradient::start_delta_from_output<__half>(const tessera::cuda::gradient::Launch&,
                                                                              cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim64>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim64General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim128>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim128General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim256>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta<__half, tessera::cuda::gradient::RowsHeadDim256General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias<__half, tessera::cuda::gradient::RowsHeadDim64General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias<__half, tessera::cuda::gradient::RowsHeadDim128General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias<__half, tessera::cuda::gradient::RowsHeadDim256General>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq<__half, 64>(const tessera::cuda::gradient::Launch&,
                                                                   cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq<__half, 128>(const tessera::cuda::gradient::Launch&,
                                                                    cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq<__half, 256>(const tessera::cuda::gradient::Launch&,
                                                                    cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dkdv_reduce<__half>(
    const tessera::cuda::gradient::DkdvReduceLaunch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_fp16_scale<__half>(const tessera::cuda::gradient::Launch&,
                                                                       cudaStream_t);
