// SPDX-License-Identifier: Apache-2.0
//
// Calls that PyTorch does not compute. The texts are those of PyTorch 2.15; sizes are filled in.
#include <fmt/format.h>

#include <algorithm>

#include "diagnose/rules.hpp"
#include "diagnose/values.hpp"

namespace tessera::diagnose {
namespace {

const char* scalar_type(Element element) {
    switch (element) {
        case Element::fp16: return "c10::Half";
        case Element::bf16: return "c10::BFloat16";
        case Element::fp32: return "float";
        case Element::fp64: return "double";
        case Element::fp8_e4m3: return "c10::Float8_e4m3fn";
        case Element::other: return "another";
    }
    return "?";
}

/// Are the dtypes of q, k and v known, and not the same?
bool has_several_dtypes(const Call& c) {
    if (!c.q.element || !c.k.element || !c.v.element) return false;
    return c.q.element != c.k.element || c.q.element != c.v.element;
}

std::optional<Raise> dtypes_differ(const Call& c) {
    if (!has_several_dtypes(c)) return {};
    return Raise{
        "dtypes-differ",
        fmt::format("Expected query, key, and value to have the same dtype, but got query.dtype: {} key.dtype: {} "
                    "and value.dtype: {} instead.",
                    scalar_type(*c.q.element), scalar_type(*c.k.element), scalar_type(*c.v.element)),
        "q, k and v differ in dtype"};
}

const char* python_type(Element element) {
    switch (element) {
        case Element::fp16: return "torch.float16";
        case Element::bf16: return "torch.bfloat16";
        case Element::fp32: return "torch.float32";
        case Element::fp64: return "torch.float64";
        case Element::fp8_e4m3: return "torch.float8_e4m3fn";
        case Element::other: return "another";
    }
    return "?";
}

/// The math path multiplies with at::matmul, which broadcasts the dimensions before the last two.
std::optional<Raise> do_not_broadcast(const Sizes& a, const Sizes& b) {
    if (a.size() != b.size()) return {};
    for (std::size_t dim = a.size() - 2; dim-- > 0;) {
        if (a[dim] == b[dim] || a[dim] == 1 || b[dim] == 1) continue;
        return Raise{dim + 3 == a.size() ? "heads-differ" : "batches-differ",
                     fmt::format("The size of tensor a ({}) must match the size of tensor b ({}) at non-singleton "
                                 "dimension {}",
                                 a[dim], b[dim], dim),
                     dim + 3 == a.size() ? "k and v have other heads than q, and enable_gqa is not set"
                                         : "q, k and v differ in batch"};
    }
    return {};
}

/// bmm's error: the product of the dimensions before the last two, and the dimension that should have been equal.
Raise inner_differ(const char* name, const Sizes& a, const Sizes& b, std::int64_t expected, std::int64_t got,
                   const char* meaning) {
    std::int64_t matrices = 1;
    for (std::size_t dim = 0; dim + 2 < a.size(); ++dim) matrices *= std::max(a[dim], b[dim]);
    return {
        name,
        fmt::format("Expected size for first two dimensions of batch2 tensor to be: [{0}, {1}] but got: [{0}, {2}].",
                    matrices, expected, got),
        meaning};
}

std::optional<Raise> math_fails(const Call& c) {
    if (!c.q.shape || !c.k.shape || !c.v.shape || c.nested != false || !c.enable_gqa) return {};
    Sizes q = *c.q.shape, k = *c.k.shape, v = *c.v.shape;
    if (q.size() < 3 || k.size() != q.size() || v.size() != q.size()) return {};
    if (*c.enable_gqa) {
        const std::size_t heads = q.size() - 3;
        const bool divides = k[heads] > 0 && v[heads] > 0 && q[heads] % k[heads] == 0 && q[heads] % v[heads] == 0;
        if (!divides)
            return Raise{"heads-do-not-divide",
                         "Number of heads in key and value must divide the number of heads in query",
                         "the heads of q are no multiple of those of k and v"};
        k[heads] = v[heads] = q[heads];
    }
    if (auto raise = do_not_broadcast(q, k)) return raise;
    if (q.back() != k.back())
        return inner_differ("head-dims-differ", q, k, q.back(), k.back(), "q and k differ in head_dim");
    for (std::size_t dim = 0; dim + 2 < q.size(); ++dim) q[dim] = std::max(q[dim], k[dim]);  // the scores'
    if (auto raise = do_not_broadcast(q, v)) return raise;
    const std::int64_t keys = k[k.size() - 2], values = v[v.size() - 2];
    if (keys != values) return inner_differ("lengths-differ", q, v, keys, values, "k and v differ in length");
    return {};
}

}  // namespace

std::optional<Raise> raise_of_bias(const Call& c) {
    if (c.is_causal == true)
        return Raise{"bias-and-is-causal", "CausalBias should not be used with causal=True",
                     "causal_lower_right and is_causal exclude each other", "ValueError"};
    if (!has_several_dtypes(c)) return {};
    return Raise{
        "dtypes-differ",
        fmt::format("Expected query, key, and value to have the same dtype, but got query.dtype: {}, key.dtype: {}, "
                    "and value.dtype: {} instead.",
                    python_type(*c.q.element), python_type(*c.k.element), python_type(*c.v.element)),
        "q, k and v differ in dtype", "ValueError"};
}

std::optional<Raise> raise_of(const Call& call, bool by_math) {
    if (auto raise = dtypes_differ(call)) return raise;
    return by_math ? math_fails(call) : std::nullopt;
}

}  // namespace tessera::diagnose
