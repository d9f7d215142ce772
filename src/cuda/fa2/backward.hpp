// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gradient/launch.hpp"

namespace tessera::cuda::fa2 {

/// Starts a block for every block of keys. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_backward(const gradient::Launch& launch, cudaStream_t stream);

/// The same in fp32.
template <class Shape>
cudaError_t start_backward_fp32(const gradient::Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa2
