// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/standard/host/config.h"
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

/// The backward's row kernel: S and dP become P and dS.
struct RowGradientLaunch {
    Launch forward;              ///< its matrix holds S, then P; `factors`: what a row of dS K is multiplied by
    float* dp = nullptr;         // [heads_q, rows, pitch] dP; then dS in 16 bits, in the first half of each row
    float* exact = nullptr;      // [heads_q, rows, pitch] dS in fp32, besides; null: not wanted
    float* unrounded = nullptr;  // [heads_q, rows, pitch] the gradient of what the bias is added to; null: not wanted
    Rows dlse;                   // [batch, len_q, heads_q] fp32; null: 0
};

/// dV = P^T dO or dK = dS^T Q.
struct KeyProductLaunch {
    Launch forward;  ///< its matrix holds P or dS
    Rows rows;       // [batch, len_q, heads_q, dim]: dO or Q
    Rows to;         // [batch, len_kv, heads_kv, dim]: dV or dK
    int dim = 0;
    int key_blocks = 0;            ///< blocks of keys of one head
    float factor = 1;              ///< of the sums
    const float* exact = nullptr;  // [heads_q, rows, pitch] the matrix in fp32; null: in 16 bits, as `forward` has it
    bool vector_rows = false;      ///< read 16 bytes at a time
    bool vector_to = false;        ///< and written so
};

/// dbias: sums over what RowGradientLaunch keeps unrounded.
struct BiasGradientLaunch {
    Launch forward;  ///< its matrix is that one
    BiasGradient dbias;
};

// One instance each in instances/; the softmax does not depend on head_dim.
template <class T, class Shape>
cudaError_t start_scores(const Launch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_softmax(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_values(const Launch& launch, cudaStream_t stream);

// Of the backward.
template <class T, class Shape>
cudaError_t start_products(const Launch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_row_gradients(const RowGradientLaunch& launch, cudaStream_t stream);
/// dQ = dS K: `launch` has dS as its matrix, K for V and dQ for O.
template <class T, class Shape>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_key_products(const KeyProductLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_bias_gradient(const BiasGradientLaunch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::standard
