// SPDX-License-Identifier: Apache-2.0
//
// Writing new keys into a cache, before attention reads them: append().
#pragma once

#include "tessera/attention.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// The tensors of append(). The rows of k and v are new keys; where each goes is said in one of two ways.
///
/// By slots: row r goes to slot_mapping[r], and slot s is row s % page_size of page s / page_size of the cache.
/// At lengths: row i of sequence b is key kv_lengths[b] + i of that sequence, in the page that page_table names or in
/// the sequence's slot.
///
/// A row is not written if its slot or its position is negative or past the end of the cache or the table, or if the
/// table names no page there. No two rows may go to the same row of the cache.
struct AppendArgs {
    TensorView k;        ///< [batch, len, heads_kv, head_dim]   | [total, heads_kv, head_dim]
    TensorView v;        ///< [batch, len, heads_kv, head_dim_v] | [total, heads_kv, head_dim_v]
    TensorView k_cache;  ///< out: [slots, capacity, heads_kv, head_dim] or [pages, page_size, heads_kv, head_dim]
    TensorView v_cache;  ///< out: the same with head_dim_v. It may share memory with k_cache
    TensorView slot_mapping{};       ///< int32 or int64, one for each row of k: appends by slots
    TensorView kv_lengths{};         ///< int32 [batch], keys before the call: appends at lengths
    TensorView page_table{};         ///< int32 [batch, pages of a sequence]: at lengths, for a cache in pages
    TensorView cache_batch_index{};  ///< int32 [batch]: at lengths, slots; without it sequence b has slot b
    /// int32 or int64 [batch + 1]: the first row of each sequence in k, if k is [total, heads_kv, head_dim]; appends at
    /// lengths only.
    TensorView cu_seqlens_k{};
    // Rotary position embedding of k, and of q, which is not appended.
    TensorView rotary_cos{};  ///< [positions, rotary_dim / 2], fp32 or the dtype of k
    TensorView rotary_sin{};  ///< the same shape and dtype
    TensorView positions{};   ///< int32 or int64, one for each row of k. Default: its position in the cache, at lengths
    TensorView q{};           ///< [batch, len_q, heads_q, head_dim] | [total_q, heads_q, head_dim]
    TensorView q_positions{};  ///< one for each row of q. Default: those of k, if q has as many rows
    TensorView q_out{};        ///< out: shape of q; it may be q itself
    // RMS norm of each row of a head, before the rotary embedding: x / sqrt(mean(x^2) + norm_eps) * weight.
    TensorView k_norm{};  ///< [head_dim], the weights, fp32 or the dtype of k
    TensorView q_norm{};
};

struct AppendOptions {
    bool rotary_interleaved = false;  ///< pairs are neighbours (GPT-J); otherwise i and i + rotary_dim / 2 (GPT-NeoX)
    double norm_eps = 1e-6;
    int threads = 0;  ///< at most; 0: one per core that this process may use
};

/// Writes new rows of K and V into a cache in place and, with q, the queries that belong to them to q_out. Rows without
/// a norm and without a rotary embedding keep their bits; all others are computed in fp64 and rounded once. Everything
/// is validated first: a call that throws has changed nothing. All tensors are on one device. On a CUDA device the work
/// is queued on how.stream, the host reads no slots, lengths, offsets or positions, and positions past rotary_cos are
/// turned as its nearest row. Throws Error(invalid_argument) naming the tensor, Error(unsupported) for a dtype that
/// CUDA does not take.
void append(const AppendArgs& args, const AppendOptions& options = {}, const Execution& how = {});

}  // namespace tessera
#pragma GCC visibility pop
