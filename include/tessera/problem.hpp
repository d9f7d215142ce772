// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/dtype.hpp"
#include "tessera/mask.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// Dropout on the attention weights. Element (batch, head, query, key) is kept when its Philox4x32-10 word is under
/// (1 - probability) * 2^32, and kept weights are divided by (1 - probability). See docs/numerics.md.
struct Dropout {
    double probability = 0;  ///< 0 <= probability < 1
    std::uint64_t seed = 0;

    friend bool operator==(const Dropout&, const Dropout&) = default;
};

/// A Problem says what to compute, and nothing about hardware, tiles or pointers:
///
///     S = scale * Q K^T;   softcap c > 0: S = c * tanh(S / c);   ALiBi: S -= slope[h] * |i + len_kv - len_q - j|;
///     S += bias;   mask;   P = softmax over keys (and the sink of the head);   dropout;   O = P V
///
/// Tensors are [batch, len, heads, head_dim] (any strides), or [total, heads, head_dim] when `ragged`. With
/// `kv_lengths` K and V are a cache (docs/numerics.md, "A cache of keys"): len_kv is the capacity of a sequence, and
/// every rule of the mask, of ALiBi and of dropout counts the keys that the sequence has.
struct Problem {
    DType dtype = DType::fp32;  ///< dtype of q, k, v, o and their gradients: fp32, bf16, fp16 (fp64: reference only)

    std::int64_t batch = 1;  ///< sequences, also when ragged
    std::int64_t len_q = 0;  ///< queries per sequence; when ragged, an upper bound over the sequences
    std::int64_t len_kv = 0;
    std::int64_t heads_q = 1;  ///< a multiple of heads_kv; query head h uses kv head h / (heads_q / heads_kv)
    std::int64_t heads_kv = 1;
    std::int64_t head_dim = 64;    ///< dimension of q and k, 1..256
    std::int64_t head_dim_v = 64;  ///< dimension of v and o, 1..256

    bool ragged = false;        ///< sequences have their own lengths, given by cu_seqlens; with a cache, of q alone
    std::int64_t total_q = 0;   ///< ragged only: rows of q over all sequences
    std::int64_t total_kv = 0;  ///< ragged only, and 0 with a cache

    Mask mask{};
    std::optional<double> scale{};  ///< default 1 / sqrt(head_dim)
    double softcap = 0;             ///< 0: none
    bool alibi = false;             ///< alibi_slopes are given
    bool sinks = false;             ///< sinks are given: a logit of each query head in the sum of the softmax
    bool bias = false;              ///< an additive bias tensor is given
    bool bias_gradient = false;     ///< the backward computes dbias too
    Dropout dropout{};

    // A cache of keys, for the forward.
    bool kv_lengths = false;  ///< K and V are a cache, and kv_lengths are given: the keys that each sequence has
    /// 0: the cache is [slots, len_kv, heads_kv, dim], a slot for each sequence. Over 0: it is
    /// [pages, page_size, heads_kv, dim], page_table is given, and len_kv is a multiple of page_size.
    std::int64_t page_size = 0;
    bool cache_batch_index = false;  ///< the slot of each sequence is given; without it sequence b has slot b
    bool left_padding = false;       ///< the first key of each sequence that counts is given

    /// Packed [batch, len, heads, head_dim] with head_dim_v == head_dim and as many query heads as kv heads.
    static Problem dense(std::int64_t batch, std::int64_t len, std::int64_t heads, std::int64_t head_dim,
                         DType dtype = DType::fp32);

    /// Query heads that share one kv head (1 without heads).
    std::int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }

    /// The scale that is applied: `scale`, or 1 / sqrt(head_dim).
    double effective_scale() const;

    /// Rows of q (of k) over all sequences: total_q when ragged, batch * len_q otherwise. A cache has its capacity.
    std::int64_t rows_q() const { return ragged ? total_q : batch * len_q; }
    std::int64_t rows_kv() const { return ragged && !kv_lengths ? total_kv : batch * len_kv; }

    /// Throws Error(invalid_argument) naming the first field that breaks the contract, what was expected, what came.
    void validate() const;

    /// A line of text: "fp32 batch 2, heads 8/2, len 128 x 256, head_dim 64, causal bottom-right".
    std::string describe() const;

    friend bool operator==(const Problem&, const Problem&) = default;
};

}  // namespace tessera
#pragma GCC visibility pop
