// SPDX-License-Identifier: Apache-2.0
//
// The list of the tensors of append(), in the order of tessera_append_args. The checks, the C ABI and Python read it.
#pragma once

#include <array>

#include "tessera/append.hpp"

namespace tessera {

// clang-format off
#define TESSERA_APPEND_TENSORS(row)                                                                                   \
    row(k) row(v) row(k_cache) row(v_cache) row(slot_mapping) row(kv_lengths) row(page_table) row(cache_batch_index)  \
    row(cu_seqlens_k) row(rotary_cos) row(rotary_sin) row(positions) row(q) row(q_positions) row(q_out) row(k_norm)   \
    row(q_norm)
// clang-format on

struct AppendTensor {
    const char* name;
    TensorView AppendArgs::*view;
};

#define TESSERA_ROW(member) AppendTensor{#member, &AppendArgs::member},
inline constexpr std::array kAppendTensors{TESSERA_APPEND_TENSORS(TESSERA_ROW)};
#undef TESSERA_ROW

static_assert(sizeof(AppendArgs) == kAppendTensors.size() * sizeof(TensorView), "a tensor is not listed");

}  // namespace tessera
