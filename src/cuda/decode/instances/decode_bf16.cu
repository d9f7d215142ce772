// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"

namespace tessera::cuda::decode {

template cudaError_t start_decode<__nv_bfloat16, HeadDim64Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim64Rows64>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim128Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim128Rows64>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim192>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim256Rows16>(const Launch&, std::int64_t, cudaStream_t);
template cudaError_t start_decode<__nv_bfloat16, HeadDim256Rows32>(const Launch&, std::int64_t, cudaStream_t);

}  // namespace tessera::cuda::decode
