// SPDX-License-Identifier: Apache-2.0
//
// Kernel parameters: plain numbers and device addresses, passed by value. Host and device code share them.
#pragma once

#include <cstdint>

#include "core/dropout.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda {

/// A [batch, len, heads, dim] or varlen [total, heads, dim] tensor in device memory; strides in elements.
struct Rows {
    char* data = nullptr;
    std::int64_t batch = 0;  ///< 0 when ragged: a sequence begins at its cu_seqlens row
    std::int64_t row = 0;
    std::int64_t head = 0;
    std::int64_t column = 0;
};

/// An additive bias [batch, heads_q, len_q, len_kv]; dimensions of size 1 have stride 0. Null: no bias.
struct Bias {
    const char* data = nullptr;
    bool fp32 = false;  ///< otherwise the Problem's dtype
    std::int64_t batch = 0;
    std::int64_t head = 0;
    std::int64_t row = 0;
    std::int64_t column = 0;
};

/// One sequence: its lengths, and its first rows in a varlen tensor (0 when dense).
struct Sequence {
    std::int64_t first_q = 0;
    std::int64_t first_kv = 0;
    int len_q = 0;
    int len_kv = 0;
};

struct ForwardParams {
    Rows q;    // [batch, len_q, heads_q, head_dim]
    Rows k;    // [batch, len_kv, heads_kv, head_dim]
    Rows v;    // [batch, len_kv, heads_kv, head_dim_v]
    Rows o;    // [batch, len_q, heads_q, head_dim_v]
    Rows lse;  // [batch, len_q, heads_q] fp32 (column unused); null: not wanted
    Bias bias;
    const float* alibi_slopes = nullptr;  // [batch, heads_q] by the strides below; null: none
    std::int64_t alibi_batch = 0;
    std::int64_t alibi_head = 0;
    const float* sinks = nullptr;  // [heads_q] by the stride below, in units of the natural logarithm; null: none
    std::int64_t sinks_step = 0;
    const void* cu_seqlens_q = nullptr;  // ragged: [batch + 1], int32 or int64; null: dense
    const void* cu_seqlens_kv = nullptr;
    std::int64_t cu_stride_q = 1;
    std::int64_t cu_stride_kv = 1;
    bool cu_q_is_64 = false;
    bool cu_kv_is_64 = false;
    std::int64_t total_q = 0;  ///< ragged: rows of q; begins and ends of sequences are clamped to it
    std::int64_t total_kv = 0;

    std::int64_t batch = 0;
    int len_q = 0;  ///< ragged: the bound over the sequences
    int len_kv = 0;
    int heads_q = 0;
    int heads_kv = 0;
    int group = 1;  ///< query heads per kv head
    int head_dim = 0;
    int head_dim_v = 0;

    Mask mask;
    float scale = 0;       ///< S = scale * Q K^T
    float softcap = 0;     ///< 0: none
    KeepRule keep;         ///< dropout: which probabilities are kept
    float keep_scale = 1;  ///< 1 / (1 - probability)

    TESSERA_HOST_DEVICE bool drops() const { return keep.blocks != 0; }
    /// The slope of a query head, 0 without ALiBi.
    TESSERA_HOST_DEVICE float alibi_slope(std::int64_t sequence, int head) const {
        return alibi_slopes == nullptr ? 0 : alibi_slopes[sequence * alibi_batch + head * alibi_head];
    }
};

/// The gradient of a bias, in its shape. Dimensions of size 1 have stride 0 and are summed over. Null: not wanted.
struct BiasGradient {
    char* data = nullptr;
    bool fp32 = false;  ///< otherwise the Problem's dtype
    std::int64_t batch = 0;
    std::int64_t head = 0;
    std::int64_t row = 0;
    std::int64_t column = 0;
};

/// The gradient of the sinks, [heads_q]. Null: not wanted.
struct SinkGradient {
    char* data = nullptr;
    bool fp64 = false;  ///< otherwise fp32
    std::int64_t step = 0;
};

/// Parameters of a backward kernel.
struct BackwardParams {
    ForwardParams forward;  ///< the inputs; o and lse are the forward's results, read only
    Rows d_o;               // [batch, len_q, heads_q, head_dim_v]
    Rows dlse;              // [batch, len_q, heads_q] fp32 (column unused); null: 0
    Rows dq;                // [batch, len_q, heads_q, head_dim]; null: not wanted, as dk and dv
    Rows dk;                // [batch, len_kv, heads_kv, head_dim]
    Rows dv;                // [batch, len_kv, heads_kv, head_dim_v]
    BiasGradient dbias;
    SinkGradient dsinks;
};

}  // namespace tessera::cuda
