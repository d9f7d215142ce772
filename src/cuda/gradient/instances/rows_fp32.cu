// SPDX-License-Identifier: Apache-2.0
#include "cuda/gradient/after/dq_convert.cuh"
#include "cuda/gradient/before/delta_fp32.cuh"
#include "cuda/gradient/start.hpp"

namespace tessera::cuda::gradient {

cudaError_t start_delta_from_output_fp32(const Launch& launch, cudaStream_t stream) {
    constexpr int kThreads = 256;
    const std::int64_t blocks = tiles_of_heads(launch.params.forward, kBlockQ);
    return start(delta_from_output_fp32_kernel<kThreads>, blocks, kThreads, 0, launch, stream);
}

}  // namespace tessera::cuda::gradient

template cudaError_t tessera::cuda::gradient::start_delta_fp32<tessera::cuda::gradient::RowsHeadDim64Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta_fp32<tessera::cuda::gradient::RowsHeadDim128Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_delta_fp32<tessera::cuda::gradient::RowsHeadDim256Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias_fp32<tessera::cuda::gradient::RowsHeadDim64Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias_fp32<tessera::cuda::gradient::RowsHeadDim128Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_bias_fp32<tessera::cuda::gradient::RowsHeadDim256Fp32>(
    const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq_fp32<64>(const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq_fp32<128>(const tessera::cuda::gradient::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::gradient::start_dq_fp32<256>(const tessera::cuda::gradient::Launch&, cudaStream_t);
