// SPDX-License-Identifier: Apache-2.0
#include "cuda/rows/add.cuh"

namespace tessera::cuda::rows {

template cudaError_t start_add<float>(const RowSums&, cudaStream_t);
template cudaError_t start_add<__nv_bfloat16>(const RowSums&, cudaStream_t);
template cudaError_t start_add<__half>(const RowSums&, cudaStream_t);

}  // namespace tessera::cuda::rows
