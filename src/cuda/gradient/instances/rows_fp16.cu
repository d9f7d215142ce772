// SPDX-License-Identifier: Apache-2.0
#include "cuda/gradient/bias.cuh"
#include "cuda/gradient/delta.cuh"
#include "cuda/gradient/delta_of_output.cuh"
#include "cuda/gradient/dq.cuh"
#include "cuda/gradient/sum_shares.cuh"
#include "cuda/gradient/units.cuh"

template cudaError_t tessera::cuda::gradient::start_delta_of_output<__half>(const tessera::cuda::gradient::Launch&,
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
template cudaError_t tessera::cuda::gradient::start_sum_shares<__half>(const tessera::cuda::gradient::SumSharesLaunch&,
                                                                       cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_units<__half>(const tessera::cuda::gradient::Launch&, cudaStream_t);
