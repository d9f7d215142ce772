// SPDX-License-Identifier: Apache-2.0
//
// Fields of a Call under the names that the rules use.
#pragma once

#include <initializer_list>

#include "diagnose/call.hpp"
#include "diagnose/fact.hpp"

namespace tessera::diagnose {

using Size = Value<std::int64_t>;

inline Value<Version> torch(const Call& c) { return {c.torch, "PyTorch's version"}; }
inline Value<int> capability(const Call& c) { return {c.gpu.capability, "the GPU's compute capability"}; }
inline Value<int> cudnn(const Call& c) { return {c.cudnn, "cuDNN's version"}; }
inline Value<int> cuda(const Call& c) { return {c.cuda, "the CUDA version that PyTorch was built for"}; }
inline Value<double> dropout(const Call& c) { return {c.dropout, "dropout_p"}; }
inline Value<bool> is_causal(const Call& c) { return {c.is_causal, "is_causal"}; }
inline Value<bool> enable_gqa(const Call& c) { return {c.enable_gqa, "enable_gqa"}; }
inline Value<bool> nested(const Call& c) { return {c.nested, "whether q, k, v are nested tensors"}; }
inline Value<bool> deterministic(const Call& c) { return {c.deterministic, "use_deterministic_algorithms"}; }
inline Value<Enabled> enabled(const Call& c) { return {c.enabled, "the switches of torch.backends.cuda"}; }
inline Value<MaskKind> mask_kind(const Call& c) { return {c.mask_kind, "attn_mask"}; }
inline Value<FlashImplementation> flash_implementation(const Call& c) {
    return {c.flash_implementation, "the flash implementation that is active"};
}

/// One dimension of a tensor of rank 4; unknown for another rank.
inline Size size_of(const Operand& t, const char* name, std::size_t dim) {
    const bool known = t.shape && t.shape->size() == 4;
    return {known ? std::optional((*t.shape)[dim]) : std::nullopt, std::string(name) + "'s shape"};
}
inline Size batch(const Call& c) { return size_of(c.q, "q", 0); }
inline Size heads_q(const Call& c) { return size_of(c.q, "q", 1); }
inline Size heads_k(const Call& c) { return size_of(c.k, "k", 1); }
inline Size heads_v(const Call& c) { return size_of(c.v, "v", 1); }
inline Size len_q(const Call& c) { return size_of(c.q, "q", 2); }
inline Size len_kv(const Call& c) { return size_of(c.k, "k", 2); }
inline Size head_dim(const Call& c) { return size_of(c.q, "q", 3); }
inline Size head_dim_k(const Call& c) { return size_of(c.k, "k", 3); }
inline Size head_dim_v(const Call& c) { return size_of(c.v, "v", 3); }

inline Value<std::size_t> rank(const Operand& t, const char* name) {
    return {t.shape ? std::optional(t.shape->size()) : std::nullopt, std::string(name) + "'s shape"};
}
inline Value<std::int64_t> last_stride(const Operand& t, const char* name) {
    const bool known = t.strides && !t.strides->empty();
    return {known ? std::optional(t.strides->back()) : std::nullopt, std::string(name) + "'s strides"};
}
inline Value<Element> element(const Operand& t, const char* name) {
    return {t.element, std::string(name) + "'s dtype"};
}
inline Value<bool> grad(const Operand& t, const char* name) {
    return {t.requires_grad, std::string("whether ") + name + " requires a gradient"};
}

inline Fact has_mask(const Call& c) { return mask_kind(c) != MaskKind::none; }
inline Fact is_nested(const Call& c) { return nested(c) == true; }
inline Fact trains(const Call& c) {
    return (grad(c.q, "q") == true) || (grad(c.k, "k") == true) || (grad(c.v, "v") == true);
}
inline Fact half_precision(const Call& c) {
    return (element(c.q, "q") == Element::fp16) || (element(c.q, "q") == Element::bf16);
}

/// True if q, k and v share one dtype, which is among these.
inline Fact dtype_among(const Call& c, std::initializer_list<Element> allowed) {
    const Value<Element> q = element(c.q, "q");
    const Fact one = q.is([&](Element e) { return std::find(allowed.begin(), allowed.end(), e) != allowed.end(); });
    return one && same(q, element(c.k, "k")) && same(q, element(c.v, "v"));
}

}  // namespace tessera::diagnose
