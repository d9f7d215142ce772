// SPDX-License-Identifier: Apache-2.0
#include "cuda/rows/add.cuh"
#include "cuda/rows/copy.cuh"

namespace tessera::cuda::rows {

template cudaError_t start_add<float>(const RowSums&, cudaStream_t);
template cudaError_t start_add<__nv_bfloat16>(const RowSums&, cudaStream_t);
template cudaError_t start_add<__half>(const RowSums&, cudaStream_t);

cudaError_t start_copy(const RowCopies& copies, cudaStream_t stream) { return start_copy_of(copies, stream); }

}  // namespace tessera::cuda::rows
