// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gradient/launch.hpp"

namespace tessera::cuda::fa2 {

/// Starts a CTA for every key block. instances/ has one instance of each shape and dtype.
template <class T, class Shape>
cudaError_t start_backward(const gradient::Launch& launch, cudaStream_t stream);

/// The fp32 forms, by three bf16 parts and by multiply-adds.
template <class Shape>
cudaError_t start_backward_parts(const gradient::Launch& launch, cudaStream_t stream);
template <class Shape>
cudaError_t start_backward_fp32(const gradient::Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa2
