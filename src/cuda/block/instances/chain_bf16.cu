// SPDX-License-Identifier: Apache-2.0
#include "cuda/block/chain.cuh"

namespace tessera::cuda::block {

template cudaError_t start_qkv<HeadDim64>(const Launch&, int, cudaStream_t);
template cudaError_t start_output<HeadDim64>(const Launch&, int, cudaStream_t);

template cudaError_t start_qkv<HeadDim128>(const Launch&, int, cudaStream_t);
template cudaError_t start_output<HeadDim128>(const Launch&, int, cudaStream_t);

}  // namespace tessera::cuda::block
