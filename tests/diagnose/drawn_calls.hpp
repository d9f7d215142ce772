// SPDX-License-Identifier: Apache-2.0
//
// Questions about calls, drawn at random.
#pragma once

#include <initializer_list>
#include <random>

#include "diagnose/calls.hpp"

namespace tessera::diagnose::cures {

/// A question that somebody may ask: everything but the release is drawn from the usual and the unusual.
inline Call drawn(std::mt19937& random) {
    const auto one_of = [&](auto list) {
        return *(list.begin() + static_cast<std::ptrdiff_t>(random() % list.size()));
    };
    const auto chance = [&](unsigned of) { return random() % of == 0; };
    Call c;
    c.torch = Version{2, one_of(std::initializer_list<int>{4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}), 0};
    c.gpu = {"", one_of(std::initializer_list<int>{70, 75, 80, 86, 89, 90, 100, 103, 120, 121}), false};
    const std::int64_t d = one_of(std::initializer_list<std::int64_t>{64, 72, 100, 128, 192, 200, 256, 320, 512});
    const std::int64_t dv = chance(4) ? one_of(std::initializer_list<std::int64_t>{64, 100, 128, 256}) : d;
    const std::int64_t heads = one_of(std::initializer_list<std::int64_t>{8, 12, 32});
    const std::int64_t kv = chance(3) ? one_of(std::initializer_list<std::int64_t>{1, 2, 5, 8}) : heads;
    const std::int64_t q = one_of(std::initializer_list<std::int64_t>{1, 128, 521, 2048});
    const std::int64_t k = chance(3) ? one_of(std::initializer_list<std::int64_t>{1, 64, 512, 2048}) : q;
    const std::int64_t batch = chance(30) ? 70000 : 2;
    const Element element = one_of(
        std::initializer_list<Element>{Element::bf16, Element::bf16, Element::fp16, Element::fp32, Element::fp64});
    c.q = tensor({batch, heads, q, d}, element);
    c.k = tensor({chance(12) ? 1 : batch, kv, k, d}, chance(12) ? Element::fp32 : element);
    c.v = tensor({(*c.k.shape)[0], kv, k, dv}, *c.k.element);
    if (chance(12)) {
        for (Operand* t : {&c.q, &c.k, &c.v}) set_shape(*t, Sizes(t->shape->begin() + 1, t->shape->end()));
    }
    c.mask_kind = MaskKind::none, c.is_causal = chance(3), c.mask.requires_grad = false;
    if (chance(3)) {
        c.is_causal = false;
        set_mask(c, chance(3) ? Sizes{heads, q, k} : Sizes{q, k}, chance(2) ? MaskKind::boolean : MaskKind::floating);
        c.mask.element = c.mask_kind == MaskKind::boolean ? Element::other : element;
        c.mask.requires_grad = chance(4);
    }
    if (chance(10)) c.k.strides->back() = 2;
    if (chance(10)) c.q.storage_offset = 3;
    c.enable_gqa = kv != heads && chance(2);
    if (chance(4)) c.dropout = one_of(std::initializer_list<double>{0.1, 0.25, 0.02});
    if (chance(4)) c.q.requires_grad = c.k.requires_grad = c.v.requires_grad = true;
    if (chance(6)) c.deterministic = true;
    if (chance(5))
        c.enabled = Enabled{.flash = chance(2), .efficient = chance(2), .math = chance(2), .cudnn = chance(2)};
    if (c.mask_kind == MaskKind::none && chance(4)) c.is_causal = false, c.causal_lower_right = true;
    std::vector<std::string> assumed;
    return assume_defaults(c, assumed);
}

/// A question with what drawn() never has: the edges of releases, installed cuDNNs and FlashAttentions, fp8, masks that
/// broadcast, expanded and empty tensors, nested ones, MQA, the newest GPUs.
inline Call drawn_at_the_edges(std::mt19937& random) {
    const auto one_of = [&](auto list) {
        return *(list.begin() + static_cast<std::ptrdiff_t>(random() % list.size()));
    };
    const auto chance = [&](unsigned of) { return random() % of == 0; };
    Call c = drawn(random);
    if (c.torch->minor == 5) c.torch->patch = chance(2) ? 1 : 0;
    c.gpu.capability = one_of(std::initializer_list<int>{70, 75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121});
    if (chance(3))
        c.cudnn = one_of(std::initializer_list<int>{90000, 90100, 90501, 91000, 91100, 91200, 91400, 91500, 91501,
                                                    91900, 92200, 92201, 92400, 92401, 92500, 92501, 92600});
    if (chance(4)) c.cuda = one_of(std::initializer_list<int>{12010, 12080, 13000, 13020});
    if (chance(5))
        c.flash_implementation =
            one_of(std::initializer_list<FlashImplementation>{FlashImplementation::fa3, FlashImplementation::fa4});
    if (chance(12)) set_elements(c, Element::fp8_e4m3);
    if (chance(40)) c.nested = true;
    const bool four = c.q.shape->size() == 4;
    if (four && chance(4)) {
        const Sizes& q = *c.q.shape;
        const std::int64_t keys = (*c.k.shape)[2];
        const Sizes shapes[] = {{q[0], 1, 1, keys}, {1, 1, q[2], keys}, {q[0], q[1], q[2], keys}, {1, keys}, {keys}};
        c.is_causal = c.causal_lower_right = false;
        set_mask(c, shapes[random() % 5], chance(2) ? MaskKind::boolean : MaskKind::floating);
        if (c.mask_kind == MaskKind::floating) c.mask.element = chance(3) ? Element::fp32 : *c.q.element;
        if (chance(4)) c.mask.strides->back() = 2;
    }
    if (four && chance(10)) c.k.strides->front() = c.v.strides->front() = 0;  // expanded
    if (four && chance(40)) {
        for (Operand* t : {&c.k, &c.v}) {
            Sizes empty = *t->shape;
            empty[2] = 0;
            set_shape(*t, empty);
        }
    }
    return c;
}

}  // namespace tessera::diagnose::cures
