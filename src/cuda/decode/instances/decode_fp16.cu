// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"

template cudaError_t tessera::cuda::decode::start_decode<__half, tessera::cuda::decode::HeadDim64>(
    const tessera::cuda::decode::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::decode::start_decode<__half, tessera::cuda::decode::HeadDim128>(
    const tessera::cuda::decode::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::decode::start_decode<__half, tessera::cuda::decode::HeadDim256>(
    const tessera::cuda::decode::Launch&, cudaStream_t);
