// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/standard/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::standard {

/// What the three kernels are launched with.
struct Launch {
    ForwardParams params;
    float* scores = nullptr;   // [heads_q, rows, pitch] S in fp32; then P in 16 bits, in the first half of each row
    float* factors = nullptr;  // [heads_q, rows] what a row of P V is multiplied by: 1 / l
    std::int64_t rows = 0;     ///< of a head: batch * len_q, or total_q when ragged
    std::int64_t pitch = 0;    ///< elements of a row of S: len_kv in whole tiles
    int q_blocks = 0;          ///< tiles of queries of one head
    bool vector_q = false;     ///< rows are read 16 bytes at a time: addresses, strides and head_dim allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_o = false;  ///< and written so
};

// One instance each in instances/; the softmax does not depend on head_dim.
template <class T, class Shape>
cudaError_t start_scores(const Launch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_softmax(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_values(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::standard
