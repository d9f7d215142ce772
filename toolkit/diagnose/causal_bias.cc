// SPDX-License-Identifier: Apache-2.0
#include "diagnose/causal_bias.hpp"

namespace tessera::diagnose {
namespace {

std::int64_t bias_len_of(const Operand& tensor) { return (*tensor.shape)[tensor.shape->size() - 2]; }

}  // namespace

bool knows_lengths(const Call& call) {
    const auto three = [](const Operand& tensor) { return tensor.shape && tensor.shape->size() >= 3; };
    return three(call.q) && three(call.k);
}

Call without_square_bias(Call call) {
    if (!call.causal_lower_right || !knows_lengths(call) || bias_len_of(call.q) != bias_len_of(call.k)) return call;
    if (call.is_causal == true) return call;  // both at once raise an error
    call.causal_lower_right = false;
    call.is_causal = true;
    return call;
}

Call with_bias_as_mask(Call call) {
    call.causal_lower_right = false;
    call.mask_kind = MaskKind::boolean;
    call.mask = Operand{.element = Element::other, .requires_grad = false, .storage_offset = 0};
    if (!knows_lengths(call)) return call;
    call.mask.shape = Sizes{bias_len_of(call.q), bias_len_of(call.k)};
    call.mask.strides = packed_strides(*call.mask.shape);
    return call;
}

}  // namespace tessera::diagnose
