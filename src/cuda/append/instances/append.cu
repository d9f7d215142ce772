// SPDX-License-Identifier: Apache-2.0
#include "cuda/append/append.cuh"

namespace tessera::cuda::append_rows {

template cudaError_t start_append<float>(const Launch&, cudaStream_t);
template cudaError_t start_append<__nv_bfloat16>(const Launch&, cudaStream_t);
template cudaError_t start_append<__half>(const Launch&, cudaStream_t);

}  // namespace tessera::cuda::append_rows
