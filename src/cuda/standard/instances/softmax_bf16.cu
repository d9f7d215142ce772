// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/softmax.cuh"

template cudaError_t tessera::cuda::standard::start_softmax<__nv_bfloat16>(const tessera::cuda::standard::Launch&,
                                                                           cudaStream_t);
