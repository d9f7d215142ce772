// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"

namespace tessera::cuda::decode {

template cudaError_t start_decode<__half, HeadDim64Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim64Rows64>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim128Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim128Rows64>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim192>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim256Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__half, HeadDim256Rows32>(const Launch&, std::int64_t, cudaStream_t);

}  // namespace tessera::cuda::decode
