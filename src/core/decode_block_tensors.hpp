// SPDX-License-Identifier: Apache-2.0
//
// The list of the tensors of decode_block(), in the order of tessera_decode_block_args. The checks, the C ABI and
// CUDA's check of addresses read it.
#pragma once

#include <array>

#include "tessera/decode_block.hpp"

namespace tessera {

// clang-format off
#define TESSERA_DECODE_BLOCK_TENSORS(row)                                                                             \
    row(x) row(norm) row(w_qkv) row(b_qkv) row(q_norm) row(k_norm) row(rotary_cos) row(rotary_sin) row(positions)     \
    row(k_cache) row(v_cache) row(kv_lengths) row(page_table) row(cache_batch_index) row(left_padding) row(sinks)     \
    row(w_o) row(b_o) row(residual) row(out) row(o) row(lse)
// clang-format on

struct DecodeBlockTensor {
    const char* name;
    TensorView DecodeBlockArgs::*view;
};

#define TESSERA_ROW(member) DecodeBlockTensor{#member, &DecodeBlockArgs::member},
inline constexpr std::array kDecodeBlockTensors{TESSERA_DECODE_BLOCK_TENSORS(TESSERA_ROW)};
#undef TESSERA_ROW

static_assert(sizeof(DecodeBlockArgs) == kDecodeBlockTensors.size() * sizeof(TensorView), "a tensor is not listed");

}  // namespace tessera
