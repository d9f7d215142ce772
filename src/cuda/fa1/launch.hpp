// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/fa1/host/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa1 {

/// Arguments of the kernel.
struct Launch {
    ForwardParams params;
    float* o = nullptr;      // [heads_q, tiles, block_q * head_dim] O in fp32, in the order of the threads that hold it
    float2* ml = nullptr;    // [heads_q, tiles, block_q] m and l of every query
    std::int64_t tiles = 0;  ///< query tiles of a head over all sequences
    int parts = 1;           ///< CTAs of a (batch, head); each has its own query tiles
    bool vector_q = false;   ///< rows are read 16 bytes at a time: addresses, strides and head_dim allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_o = false;  ///< rows are written 16 bytes at a time
};

/// Starts the kernel. instances/ has one instance of each shape and dtype.
template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa1
