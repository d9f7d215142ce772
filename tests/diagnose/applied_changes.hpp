// SPDX-License-Identifier: Apache-2.0
//
// The changes of cures, applied a second time by the tests' own hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "diagnose/calls.hpp"

namespace tessera::diagnose::cures {

using enum SdpBackend;

inline std::int64_t up_to_8(std::int64_t size) { return (size + 7) / 8 * 8; }

/// A copy is packed, and begins at the first element of its storage.
inline void resize(Call& c, std::size_t dim, std::int64_t q, std::int64_t k, std::int64_t v) {
    for (const auto& [t, size] : {std::pair{&c.q, q}, {&c.k, k}, {&c.v, v}}) {
        Sizes shape = *t->shape;
        if (shape[dim] == size) continue;
        shape[dim] = size;
        set_shape(*t, shape);
    }
}

/// A view keeps strides and offset.
inline void view(Call& c, std::int64_t batch) {
    for (Operand* t : {&c.q, &c.k, &c.v}) {
        if (t->shape->front() == 1) t->strides->front() = 0;
        t->shape->front() = batch;
    }
}

inline void four(Operand& t) {
    while (t.shape->size() < 4) {
        t.shape->insert(t.shape->begin(), 1);
        if (t.strides) t.strides->insert(t.strides->begin(), 1);
    }
}

/// Does what a printed change says. False for a name that this file does not know.
inline bool apply(Call& c, const std::string& name, SdpBackend wanted) {
    const auto size = [](const Operand& t, std::size_t dim) { return (*t.shape)[dim]; };
    const auto version = [&](std::size_t from) { return name.substr(from); };
    const auto four_each = [&] { return c.q.shape->size() == 4 && c.k.shape->size() == 4 && c.v.shape->size() == 4; };
    for (const char* of_four : {"expand-", "split-", "repeat-", "pad-"}) {
        if (name.starts_with(of_four) && !four_each()) return true;  // unsqueeze was left out
    }
    if (name == "leave-context") c.enabled = Enabled{};
    else if (name == "select")
        c.enabled = Enabled{.flash = wanted == flash || wanted == fa3 || wanted == fa4,
                            .efficient = wanted == efficient,
                            .math = false,
                            .cudnn = wanted == cudnn};
    else if (name == "not-deterministic") c.deterministic = false;
    else if (name == "unsqueeze") {
        four(c.q), four(c.k), four(c.v);
        if (c.mask.shape && c.mask.shape->size() == 3) four(c.mask);
    } else if (name == "contiguous" || name == "clone") {
        for (Operand* t : {&c.q, &c.k, &c.v, &c.mask}) {
            if (!t->shape || !t->strides) continue;
            const bool moves = name == "clone" ? t->storage_offset.value_or(0) != 0 : t->strides->back() != 1;
            if (moves)
                *t = [&] {
                    Operand packed = tensor(*t->shape, t->element.value_or(Element::other));
                    packed.requires_grad = t->requires_grad;
                    return packed;
                }();
        }
    } else if (name == "drop-mask")
        c.mask_kind = MaskKind::none, c.mask = Operand{.requires_grad = false}, c.is_causal = false;
    else if (name == "detach-mask") c.mask.requires_grad = false;
    else if (name == "unsqueeze-mask") {
        c.mask.shape->insert(c.mask.shape->begin(), 1);
        if (c.mask.strides) c.mask.strides->insert(c.mask.strides->begin(), 1);
    } else if (name == "cast-mask") c.mask.element = c.q.element;
    else if (name == "expand-batch") {
        const std::int64_t most = std::max({size(c.q, 0), size(c.k, 0), size(c.v, 0)});
        view(c, most);
    } else if (name == "split-batch") {  // a batch of one is not cut
        for (Operand* t : {&c.q, &c.k, &c.v}) t->shape->front() = std::min<std::int64_t>(t->shape->front(), 65535);
    } else if (name == "enable-gqa") c.enable_gqa = true;
    else if (name == "repeat-heads") {
        resize(c, 1, size(c.q, 1), size(c.q, 1), size(c.q, 1));
        c.enable_gqa = false;
    } else if (name == "pad-to-8") resize(c, 3, up_to_8(size(c.q, 3)), up_to_8(size(c.k, 3)), up_to_8(size(c.v, 3)));
    else if (name == "pad-alike") {
        const std::int64_t most = up_to_8(std::max(size(c.q, 3), size(c.v, 3)));
        resize(c, 3, most, most, most);
    } else if (name == "pad-to-256") resize(c, 3, 256, 256, 256);
    else if (name == "not-causal") c.is_causal = false;
    else if (name == "lower-right") c.is_causal = false, c.causal_lower_right = true;
    else if (name == "cast") {
        const Element q = *c.q.element;
        const bool bf16 = c.gpu.rocm == true || *c.gpu.capability >= 80;
        const bool stays =
            q == Element::fp16 || (q == Element::bf16 && bf16) || (q == Element::fp32 && wanted == efficient);
        set_elements(c, stays ? q : bf16 ? Element::bf16 : Element::fp16);
        if (c.mask_kind == MaskKind::floating) c.mask.element = c.q.element;
    } else if (name == "dropout-in-16ths") c.dropout = std::clamp(std::round(*c.dropout * 16), 1.0, 15.0) / 16;
    else if (name == "no-dropout") c.dropout = 0;
    else if (name == "no-grad") c.q.requires_grad = c.k.requires_grad = c.v.requires_grad = false;
    else if (name == "restore-flash") c.flash_implementation = FlashImplementation::own;
    else if (name == "activate-fa3") c.flash_implementation = FlashImplementation::fa3;
    else if (name == "activate-fa4") c.flash_implementation = FlashImplementation::fa4;
    else if (name.starts_with("cudnn-")) {
        int major = 0, minor = 0, patch = 0;
        if (std::sscanf(version(6).c_str(), "%d.%d.%d", &major, &minor, &patch) != 3) return false;
        c.cudnn = major * 10000 + minor * 100 + patch;
    } else if (name.starts_with("torch-")) {
        c.torch = Version{2, std::stoi(version(8)), 0};
        c.cudnn.reset(), c.cuda.reset();
        std::vector<std::string> assumed;
        c = assume_defaults(c, assumed);
    } else return false;
    return true;
}

/// Can this change be made to the call, so that its result stays as it is, or is what the change says?
inline bool can(const Call& c, const std::string& name, SdpBackend wanted) {
    const auto size = [](const Operand& t, std::size_t dim) { return (*t.shape)[dim]; };
    const bool masked = c.mask_kind != MaskKind::none, nested = c.nested == true;
    const std::size_t ranks[] = {c.q.shape->size(), c.k.shape->size(), c.v.shape->size()};
    const bool four_each = std::all_of(std::begin(ranks), std::end(ranks), [](std::size_t rank) { return rank == 4; });
    const auto any_of_three = [&](auto test) { return test(c.q) || test(c.k) || test(c.v); };
    if (name == "leave-context") return c.enabled != Enabled{};
    if (name == "select") return true;
    if (name == "not-deterministic") return c.deterministic == true;
    if (name == "cast") return true;
    if (name == "dropout-in-16ths" || name == "no-dropout") return c.dropout.value_or(0) > 0;
    if (name == "no-grad") return any_of_three([](const Operand& t) { return t.requires_grad == true; });
    if (name == "restore-flash") return wanted == flash;
    if (name == "activate-fa3") return wanted == fa3;
    if (name == "activate-fa4") return wanted == fa4;
    int minor = 0, patch = 0;
    if (std::sscanf(name.c_str(), "torch-2.%d", &minor) == 1) return minor > c.torch->minor;
    if (std::sscanf(name.c_str(), "cudnn-9.%d.%d", &minor, &patch) == 2)
        return c.cudnn && 90000 + minor * 100 + patch > *c.cudnn;
    if (nested) return false;
    if (name == "unsqueeze")
        return !four_each && std::all_of(std::begin(ranks), std::end(ranks), [](std::size_t rank) { return rank > 1; });
    const auto strided = [](const Operand& t) { return t.strides && !t.strides->empty() && t.strides->back() != 1; };
    if (name == "contiguous") return any_of_three(strided) || (masked && strided(c.mask));
    if (name == "clone") return any_of_three([](const Operand& t) { return t.storage_offset.value_or(0) != 0; });
    if (name == "drop-mask") return masked;
    if (name == "detach-mask") return masked && c.mask.requires_grad == true;
    if (name == "unsqueeze-mask") return masked && c.mask.shape && c.mask.shape->size() % 2 == 1;
    if (name == "cast-mask") return c.mask_kind == MaskKind::floating && c.mask.element != c.q.element;
    if (!four_each) return false;
    const std::int64_t batch = std::max({size(c.q, 0), size(c.k, 0), size(c.v, 0)});
    if (name == "expand-batch")
        return !any_of_three([&](const Operand& t) { return size(t, 0) != 1 && size(t, 0) != batch; });
    if (name == "split-batch")
        return batch > 65535 && !masked && !any_of_three([&](const Operand& t) { return size(t, 0) != batch; });
    const std::int64_t q = size(c.q, 1), k = size(c.k, 1), v = size(c.v, 1);
    const bool divide = k > 0 && v > 0 && q % k == 0 && q % v == 0;
    if (name == "enable-gqa") return divide && k == v && q != k;
    if (name == "repeat-heads") return divide && (q != k || q != v);
    if (name.starts_with("pad-")) return size(c.q, 3) == size(c.k, 3) && std::max(size(c.q, 3), size(c.v, 3)) <= 256;
    const bool off_square = c.is_causal == true && size(c.q, 2) != size(c.k, 2);
    if (name == "not-causal") return off_square && size(c.q, 2) == 1;
    return name == "lower-right" && off_square && size(c.q, 2) != 1 &&
           (wanted == flash || wanted == fa3 || wanted == fa4);
}

}  // namespace tessera::diagnose::cures
