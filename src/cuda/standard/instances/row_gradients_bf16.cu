// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/bias_gradient.cuh"
#include "cuda/standard/row_gradients.cuh"

template cudaError_t tessera::cuda::standard::start_row_gradients<__nv_bfloat16>(
    const tessera::cuda::standard::RowGradientLaunch&, cudaStream_t);
template cudaError_t tessera::cuda::standard::start_bias_gradient<__nv_bfloat16>(
    const tessera::cuda::standard::BiasGradientLaunch&, cudaStream_t);
