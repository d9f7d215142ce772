// SPDX-License-Identifier: Apache-2.0
#include "cuda/block/block.cuh"

namespace tessera::cuda::block {

template FixedBytes fixed_bytes<HeadDim64>();
template cudaError_t start_block<HeadDim64>(const Launch&, int, bool, cudaStream_t);

template FixedBytes fixed_bytes<HeadDim128>();
template cudaError_t start_block<HeadDim128>(const Launch&, int, bool, cudaStream_t);

}  // namespace tessera::cuda::block
