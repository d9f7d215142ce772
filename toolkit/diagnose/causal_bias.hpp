// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's causal_lower_right as attn_mask (torch/nn/attention/bias.py; its code is the same from 2.4 to 2.15). Its
// class, CausalBias, chooses by itself. With equal lengths, and for causal_upper_left, it sets is_causal=True. Else it
// asks flash, then the memory-efficient kernels, without a mask; if both refuse, it makes a bool tensor of
// [len_q, len_kv] and calls scaled_dot_product_attention with it.
#pragma once

#include "diagnose/call.hpp"

namespace tessera::diagnose {

/// Replaces causal_lower_right by is_causal where the lengths are equal.
Call without_square_bias(Call call);

/// True if q and k have lengths of which a square can be told: three dimensions or more each.
bool knows_lengths(const Call& call);

/// The call that the class makes in the end: with a bool tensor in place of causal_lower_right.
Call with_bias_as_mask(Call call);

}  // namespace tessera::diagnose
