// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/key_gemm.cuh"
#include "cuda/standard/scores.cuh"
#include "cuda/standard/values.cuh"

template cudaError_t tessera::cuda::standard::start_gemm<__nv_bfloat16, tessera::cuda::standard::HeadDim64>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::standard::start_dq<__nv_bfloat16, tessera::cuda::standard::HeadDim64>(
    const tessera::cuda::standard::Launch&, cudaStream_t);
template cudaError_t tessera::cuda::standard::start_key_gemm<__nv_bfloat16, tessera::cuda::standard::HeadDim64>(
    const tessera::cuda::standard::KeyGemmLaunch&, cudaStream_t);
