// SPDX-License-Identifier: Apache-2.0
//
// Calls for the tests of the rules.
#pragma once

#include "diagnose/rules.hpp"

namespace tessera::diagnose {

inline Operand tensor(const Sizes& shape, Element element) {
    Operand t{.element = element, .shape = shape, .requires_grad = false, .storage_offset = 0};
    t.strides = Sizes(shape.size(), 1);
    for (std::size_t d = shape.size(); d-- > 1;) (*t.strides)[d - 1] = (*t.strides)[d] * shape[d];
    return t;
}

/// Everything is known, and every backend passes: fp16, [2, 8, 512, 64], no mask, no gradient, an H200.
inline Call known_call(const Version& torch) {
    const Sizes shape = {2, 8, 512, 64};
    Call call{.torch = torch, .gpu = {"NVIDIA H200", 90, false}};
    call.q = call.k = call.v = tensor(shape, Element::fp16);
    call.mask.requires_grad = false;
    call.mask_kind = MaskKind::none;
    call.is_causal = false;
    std::vector<std::string> assumed;
    return assume_defaults(call, assumed);
}

inline void set_shape(Operand& t, const Sizes& shape) {
    const auto grad = t.requires_grad;
    t = tensor(shape, t.element.value_or(Element::fp16));
    t.requires_grad = grad;
}

inline void set_shapes(Call& call, const Sizes& q, const Sizes& k, const Sizes& v) {
    set_shape(call.q, q), set_shape(call.k, k), set_shape(call.v, v);
}

inline void set_elements(Call& call, Element element) { call.q.element = call.k.element = call.v.element = element; }

inline void set_mask(Call& call, const Sizes& shape, MaskKind kind = MaskKind::boolean) {
    call.mask = tensor(shape, kind == MaskKind::boolean ? Element::other : Element::fp16);
    call.mask_kind = kind;
}

}  // namespace tessera::diagnose
