// SPDX-License-Identifier: Apache-2.0
//
// The list of the fields of a Problem, as the C ABI has them. tessera.h states the struct, and c_api.cc reads it and
// sets its defaults by this list (docs/architecture.md, "A new tensor argument").
#pragma once

#include <string>

#include "tessera/problem.hpp"

namespace tessera {

// clang-format off
/// Every field of tessera_problem after struct_size, in its order: row(kind, field, member of Problem). The kind says
/// the C type: `size` is int64_t, `number` and `scale` are double, `seed` is uint64_t, all others are int32_t.
#define TESSERA_PROBLEM_FIELDS(row)                              \
    row(dtype,  dtype,               dtype)                      \
    row(flag,   ragged,              ragged)                     \
    row(size,   batch,               batch)                      \
    row(size,   len_q,               len_q)                      \
    row(size,   len_kv,              len_kv)                     \
    row(size,   heads_q,             heads_q)                    \
    row(size,   heads_kv,            heads_kv)                   \
    row(size,   head_dim,            head_dim)                   \
    row(size,   head_dim_v,          head_dim_v)                 \
    row(size,   total_q,             total_q)                    \
    row(size,   total_kv,            total_kv)                   \
    row(size,   window_left,         mask.window_left)           \
    row(size,   window_right,        mask.window_right)          \
    row(causal, causal,              mask.causal)                \
    row(flag,   alibi,               alibi)                      \
    row(flag,   bias,                bias)                       \
    row(flag,   bias_gradient,       bias_gradient)              \
    row(scale,  scale,               scale)                      \
    row(number, softcap,             softcap)                    \
    row(number, dropout_probability, dropout.probability)        \
    row(seed,   dropout_seed,        dropout.seed)               \
    row(size,   page_size,           page_size)                  \
    row(flag,   kv_lengths,          kv_lengths)                 \
    row(flag,   cache_batch_index,   cache_batch_index)          \
    row(flag,   left_padding,        left_padding)         \
    row(flag,   sinks,               sinks)
// clang-format on

/// The features of a Problem besides sizes, mask and scale: "softcap 30, alibi, dropout 0.1"; empty: none.
std::string describe_features(const Problem& problem);

}  // namespace tessera
