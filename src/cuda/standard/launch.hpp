// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/standard/host/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::standard {

/// Arguments of the three kernels of the forward.
struct Launch {
    ForwardParams params;
    float* scores = nullptr;   // [heads_q, rows, pitch] S in fp32; then P in 16 bits, in the first half of each row
    float* factors = nullptr;  // [heads_q, rows] the factor of a row of P V: 1 / l
    std::int64_t rows = 0;     ///< rows of a head: batch * len_q, or total_q when ragged
    std::int64_t pitch = 0;    ///< elements of a row of S: len_kv rounded up to whole tiles
    int q_blocks = 0;          ///< query tiles of one head
    bool vector_q = false;     ///< rows are read 16 bytes at a time: addresses, strides and head_dim allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_o = false;  ///< rows are written 16 bytes at a time
};

/// Arguments of the backward's row kernel, in which S and dP become P and dS.
struct RowGradientLaunch {
    Launch forward;              ///< its matrix holds S, then P; its factors are those of rows of dS K
    float* dp = nullptr;         // [heads_q, rows, pitch] dP; then dS in 16 bits, in the first half of each row
    float* exact = nullptr;      // [heads_q, rows, pitch] dS in fp32 as well; null: not wanted
    float* unrounded = nullptr;  // [heads_q, rows, pitch] dS before the softcap; null: not wanted
    float* delta = nullptr;      // [heads_q, rows] delta - dLSE, for dsinks; null: not wanted
    Rows dlse;                   // [batch, len_q, heads_q] fp32; null: 0
};

/// Arguments of dV = P^T dO or dK = dS^T Q.
struct KeyGemmLaunch {
    Launch forward;  ///< its matrix holds P or dS
    Rows rows;       // [batch, len_q, heads_q, dim]: dO or Q
    Rows to;         // [batch, len_kv, heads_kv, dim]: dV or dK
    int dim = 0;
    int key_blocks = 0;            ///< key blocks of one head
    float factor = 1;              ///< multiplies the sums
    const float* exact = nullptr;  // [heads_q, rows, pitch] the matrix in fp32; null: in 16 bits, as `forward` has it
    bool vector_rows = false;      ///< `rows` is read 16 bytes at a time
    bool vector_to = false;        ///< `to` is written 16 bytes at a time
};

/// Arguments of dbias, the sum over RowGradientLaunch::unrounded.
struct BiasGradientLaunch {
    Launch forward;  ///< its matrix is `unrounded`
    BiasGradient dbias;
};

/// Arguments of dsinks.
struct SinkLaunch {
    BackwardParams params;
    const float* delta = nullptr;  // RowGradientLaunch::delta
    std::int64_t rows = 0;         ///< of a head
};

// The kernels of the forward. instances/ has one instance of each; the softmax does not depend on head_dim.
template <class T, class Shape>
cudaError_t start_scores(const Launch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_softmax(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_values(const Launch& launch, cudaStream_t stream);

// The kernels of the backward.
template <class T, class Shape>
cudaError_t start_gemm(const Launch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_row_gradients(const RowGradientLaunch& launch, cudaStream_t stream);
/// dQ = dS K: `launch` has dS as its matrix, K for V and dQ for O.
template <class T, class Shape>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_key_gemm(const KeyGemmLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t start_bias_gradient(const BiasGradientLaunch& launch, cudaStream_t stream);
cudaError_t start_sink_gradient(const SinkLaunch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::standard
