// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/forward_fp32.cuh"

template cudaError_t tessera::cuda::fa2::start_forward_fp32<64>(const tessera::cuda::fa2::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_forward_fp32<128>(const tessera::cuda::fa2::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::fa2::start_forward_fp32<256>(const tessera::cuda::fa2::Launch&, cudaStream_t);
