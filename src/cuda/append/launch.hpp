// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda::append_rows {

/// A [batch, len, heads, dim] or ragged [total, heads, dim] tensor; strides in elements.
struct Rows {
    char* data = nullptr;
    std::int64_t count = 0;  ///< rows over all sequences
    std::int64_t len = 1;    ///< rows of a sequence; a ragged tensor is one sequence
    std::int64_t batch = 0;
    std::int64_t row = 0;
    std::int64_t head = 0;
    std::int64_t column = 0;
    int heads = 0;
};

/// Integers [count], or [rows, count] by `row_step`. Null: not given.
struct Integers {
    const void* data = nullptr;
    std::int64_t step = 0;
    std::int64_t row_step = 0;
    std::int64_t count = 0;
    bool is_64 = false;
};

/// Numbers [rows, count], fp32 or the dtype of k. Null: not given.
struct Numbers {
    const void* data = nullptr;
    std::int64_t row_step = 0;
    std::int64_t step = 0;
    bool fp32 = false;
};

/// Arguments of the kernel: the rows, where they go in the cache, and how they are changed.
struct Launch {
    Rows k, v, q, q_out;
    Rows k_cache, v_cache;   ///< `batch` is the stride of slots or pages, `len` the rows of one
    std::int64_t slots = 0;  ///< slots or pages of the cache
    Integers slot_mapping, kv_lengths, page_table, cache_batch_index, cu_seqlens_k, positions, q_positions;
    std::int64_t sequences = 0;
    Numbers cos, sin, k_norm, q_norm;
    std::int64_t rotary_positions = 0;
    int pairs = 0;  ///< rotary_dim / 2; 0: no rotary embedding
    bool interleaved = false;
    double norm_eps = 0;
    int head_dim = 0;
    int head_dim_v = 0;
};

/// Writes all rows. T: float, __nv_bfloat16 or __half.
template <class T>
cudaError_t start_append(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::append_rows
