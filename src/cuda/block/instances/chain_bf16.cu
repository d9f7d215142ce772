// SPDX-License-Identifier: Apache-2.0
#include "cuda/block/chain.cuh"

namespace tessera::cuda::block {

cudaError_t start_qkv(const Launch& launch, int blocks, cudaStream_t stream) {
    return start(product_kernel<true>, blocks, Config::threads(), launch.layout.bytes, launch, stream);
}

cudaError_t start_output(const Launch& launch, int blocks, cudaStream_t stream) {
    return start(product_kernel<false>, blocks, Config::threads(), launch.layout.bytes, launch, stream);
}

}  // namespace tessera::cuda::block
