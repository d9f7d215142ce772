// SPDX-License-Identifier: Apache-2.0
//
// Kernels for the operators of schema.cc, through PyTorch's stable ABI. The file is compiled once for each dispatch key
// (TESSERA_TORCH_KEY). The stable ABI has no interface for gradients, fake kernels and vmap rules, so Python registers
// those (python/tessera/torch/_operators.py, _functorch.py).
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "results.hpp"

namespace tessera::torch_ops {
namespace {

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// (o, lse), and o_residual where the operator returns it.
template <bool with_residual>
using Forward = std::conditional_t<with_residual, std::tuple<Tensor, Tensor, Tensor>, std::tuple<Tensor, Tensor>>;

template <bool with_residual>
Forward<with_residual> forward_results(const Inputs& in, const Settings& settings) {
    Results found = run_forward(in, settings, {.residual = with_residual});
    if constexpr (with_residual) return {std::move(found.o), *std::move(found.lse), *std::move(found.o_residual)};
    else return {std::move(found.o), *std::move(found.lse)};
}

// TORCH_BOX derives an operator's boxing from the parameters of its function, so each function lists all of them.
template <bool with_residual>
Forward<with_residual> forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                                  const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                                  const OptionalTensor cu_seqlens_kv, const OptionalTensor seed, std::int64_t max_len_q,
                                  std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left,
                                  std::int64_t window_right, std::optional<double> scale, double softcap,
                                  double dropout_p, const std::optional<std::string> kernel, bool heads_first) {
    return with_torch_errors([&] {
        return forward_results<with_residual>(
            {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed},
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first});
    });
}

/// The settings that most calls use. An operator of these converts 8 arguments instead of 18.
Settings few_settings(std::int64_t causal, bool heads_first, std::optional<double> scale, std::int64_t window_left,
                      std::int64_t window_right) {
    return {.causal = causal,
            .window_left = window_left,
            .window_right = window_right,
            .scale = scale,
            .heads_first = heads_first};
}

/// O alone: it allocates no LSE.
Tensor forward_o_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                    std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return run_forward({q, k, v}, few_settings(causal, heads_first, scale, window_left, window_right),
                           {.lse = false})
            .o;
    });
}

template <bool with_residual>
Forward<with_residual> forward_few_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal,
                                      bool heads_first, std::optional<double> scale, std::int64_t window_left,
                                      std::int64_t window_right) {
    return with_torch_errors([&] {
        return forward_results<with_residual>({q, k, v},
                                              few_settings(causal, heads_first, scale, window_left, window_right));
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

template <bool with_residual>
Forward<with_residual> with_sinks_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                                     const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                                     const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                                     std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal,
                                     std::int64_t window_left, std::int64_t window_right, std::optional<double> scale,
                                     double softcap, double dropout_p, const std::optional<std::string> kernel,
                                     bool heads_first, const Tensor sinks) {
    return with_torch_errors([&] {
        return forward_results<with_residual>(
            {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, sinks},
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first});
    });
}

using BackwardWithSinks = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

BackwardWithSinks with_sinks_backward_op(const Tensor d_o, const OptionalTensor dlse, const Tensor q, const Tensor k,
                                         const Tensor v, const Tensor o, const Tensor lse, const OptionalTensor bias,
                                         const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                                         const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                                         std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal,
                                         std::int64_t window_left, std::int64_t window_right,
                                         std::optional<double> scale, double softcap, double dropout_p,
                                         const std::optional<std::string> kernel, bool bias_gradient, bool heads_first,
                                         const Tensor sinks, const OptionalTensor o_residual) {
    return with_torch_errors([&]() -> BackwardWithSinks {
        Gradients found = run_backward(
            d_o, dlse, {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, sinks}, o, lse, o_residual,
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first},
            bias_gradient);
        if (!bias_gradient) found.dbias = empty(q, {0}, TensorRef(q).dtype());
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv), *std::move(found.dbias),
                *std::move(found.dsinks)};
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("attention", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("attention_with_residual", TORCH_BOX(&tessera::torch_ops::forward_op<true>));
    m.impl("attention_backward", TORCH_BOX(&tessera::torch_ops::backward_op));
    m.impl("attention_with_sinks", TORCH_BOX(&tessera::torch_ops::with_sinks_op<false>));
    m.impl("attention_with_sinks_and_residual", TORCH_BOX(&tessera::torch_ops::with_sinks_op<true>));
    m.impl("attention_with_sinks_backward", TORCH_BOX(&tessera::torch_ops::with_sinks_backward_op));
    m.impl("forward", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("forward_with_residual", TORCH_BOX(&tessera::torch_ops::forward_op<true>));
    m.impl("forward_o", TORCH_BOX(&tessera::torch_ops::forward_o_op));
    m.impl("forward_few", TORCH_BOX(&tessera::torch_ops::forward_few_op<false>));
    m.impl("forward_few_with_residual", TORCH_BOX(&tessera::torch_ops::forward_few_op<true>));
    m.impl("backward", TORCH_BOX(&tessera::torch_ops::backward_op));
}
