// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/fa2/host/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa2 {

/// Arguments of the kernel.
struct Launch {
    ForwardParams params;
    std::int64_t blocks = 0;  ///< CTAs: query tiles of all heads
    int q_blocks = 0;         ///< query tiles of one head; ragged: of all sequences
    int heads_together =
        1;  ///< (batch, head) pairs (ragged: heads) with interleaved tiles, so that their K and V stay in L2
    bool vector_q = false;  ///< rows are read 16 bytes at a time: addresses, strides and head_dim allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_o = false;         ///< rows are written 16 bytes at a time
    Rows o_residual;               ///< low-order bits of O, a byte an element; null: not wanted
    bool vector_residual = false;  ///< 8 bytes at a time
};

/// Starts a CTA for every query tile. instances/ has one instance of each shape and dtype.
template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, cudaStream_t stream);

/// The fp32 form.
template <class Shape>
cudaError_t start_forward_fp32(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa2
