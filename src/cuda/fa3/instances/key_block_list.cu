// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/before/key_block_list.cuh"

namespace tessera::cuda::fa3::backward {

template cudaError_t launch_list<64, 64>(const Launch&, cudaStream_t);
template cudaError_t launch_list<64, 128>(const Launch&, cudaStream_t);
template cudaError_t launch_list<128, 128>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::fa3::backward
