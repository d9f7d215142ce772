// SPDX-License-Identifier: Apache-2.0
//
// The operators of schema.cc on PyTorch's stable ABI. One source, compiled once for each dispatch key
// (TESSERA_TORCH_KEY). Fake kernels, gradients and the vmap rule are Python's (python/tessera/torch): the stable ABI
// has no words for them.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "results.hpp"

namespace tessera::torch_ops {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using ThreeGradients = std::tuple<Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// What the forward operators return: with the residual of O or without.
template <bool with_residual>
using Returned = std::conditional_t<with_residual, std::tuple<Tensor, Tensor, Tensor>, Forward>;

template <bool with_residual>
Returned<with_residual> forward_results(const Inputs& in, const Settings& settings) {
    Results found = run_forward(in, settings, {.rest = with_residual});
    if constexpr (with_residual) return {std::move(found.o), *std::move(found.lse), *std::move(found.o_residual)};
    else return {std::move(found.o), *std::move(found.lse)};
}

// PyTorch boxes a function by its parameters, so that each operator has to list all of them.
template <bool with_residual>
Returned<with_residual> forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                                   const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                                   const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                                   std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal,
                                   std::int64_t window_left, std::int64_t window_right, std::optional<double> scale,
                                   double softcap, double dropout_p, const std::optional<std::string> kernel,
                                   bool heads_first) {
    return with_torch_errors([&] {
        return forward_results<with_residual>(
            {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed},
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first});
    });
}

Backward backward_op(const Tensor d_o, const OptionalTensor dlse, const Tensor q, const Tensor k, const Tensor v,
                     const Tensor o, const Tensor lse, const OptionalTensor bias, const OptionalTensor alibi_slopes,
                     const OptionalTensor cu_seqlens_q, const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                     std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left,
                     std::int64_t window_right, std::optional<double> scale, double softcap, double dropout_p,
                     const std::optional<std::string> kernel, bool bias_gradient, bool heads_first,
                     const OptionalTensor o_residual) {
    return with_torch_errors([&]() -> Backward {
        Gradients found = run_backward(
            d_o, dlse, {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed}, o, lse, o_residual,
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first},
            bias_gradient);
        if (!bias_gradient) found.dbias = empty(q, {0}, TensorRef(q).dtype());
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv), *std::move(found.dbias)};
    });
}

Settings plain_settings(std::int64_t causal, bool heads_first, std::optional<double> scale, std::int64_t window_left,
                        std::int64_t window_right) {
    return {.causal = causal,
            .window_left = window_left,
            .window_right = window_right,
            .scale = scale,
            .heads_first = heads_first};
}

template <bool with_residual>
Returned<with_residual> plain_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                                 std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return forward_results<with_residual>({q, k, v},
                                              plain_settings(causal, heads_first, scale, window_left, window_right));
    });
}

/// Without LSE, for calls that drop it: a tensor less to allocate and to hand to Python.
Tensor plain_o_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                  std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return run_forward({q, k, v}, plain_settings(causal, heads_first, scale, window_left, window_right),
                           {.lse = false})
            .o;
    });
}

ThreeGradients plain_backward_op(const Tensor d_o, const Tensor q, const Tensor k, const Tensor v, const Tensor o,
                                 const Tensor lse, const OptionalTensor o_residual, std::int64_t causal,
                                 bool heads_first, std::optional<double> scale, std::int64_t window_left,
                                 std::int64_t window_right) {
    return with_torch_errors([&]() -> ThreeGradients {
        Gradients found = run_backward(d_o, {}, {q, k, v}, o, lse, o_residual,
                                       plain_settings(causal, heads_first, scale, window_left, window_right), false);
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv)};
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("forward", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("attention", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("attention_with_residual", TORCH_BOX(&tessera::torch_ops::forward_op<true>));
    m.impl("backward", TORCH_BOX(&tessera::torch_ops::backward_op));
    m.impl("plain", TORCH_BOX(&tessera::torch_ops::plain_op<false>));
    m.impl("plain_with_residual", TORCH_BOX(&tessera::torch_ops::plain_op<true>));
    m.impl("plain_backward", TORCH_BOX(&tessera::torch_ops::plain_backward_op));
    m.impl("plain_o", TORCH_BOX(&tessera::torch_ops::plain_o_op));
}
