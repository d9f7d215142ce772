// SPDX-License-Identifier: Apache-2.0
//
// The list of the fields of DecodeBlockProblem, in the order of tessera_decode_block_problem, which has `way` after
// them. The C ABI reads it: row(kind, field), with the kinds of core/problem_fields.hpp.
#pragma once

// clang-format off
#define TESSERA_DECODE_BLOCK_FIELDS(row)                                                                              \
    row(dtype, dtype) row(dtype, weights_dtype)                                                                       \
    row(size, batch) row(size, hidden) row(size, heads_q) row(size, heads_kv) row(size, head_dim)                     \
    row(size, capacity) row(size, page_size) row(size, window_left) row(size, rotary_dim)                             \
    row(scale, scale) row(number, softcap) row(number, norm_eps)                                                      \
    row(flag, rotary_interleaved) row(flag, cache_batch_index) row(flag, left_padding) row(flag, sinks)               \
    row(flag, qkv_bias) row(flag, out_bias) row(flag, qk_norm)
// clang-format on
