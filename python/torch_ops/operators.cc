// SPDX-License-Identifier: Apache-2.0
//
// The operators of schema.cc on PyTorch's stable ABI. One source, compiled once for each dispatch key
// (TESSERA_TORCH_KEY). Fake kernels, gradients and the vmap rule are Python's (python/tessera/torch): the stable ABI
// has no words for them.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "call.hpp"

namespace tessera::torch_ops {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using ThreeGradients = std::tuple<Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// A new tensor in the shape of o: [batch, len_q, heads_q, head_dim_v], [batch, heads_q, len_q, head_dim_v] with
/// heads_first | [total_q, heads_q, head_dim_v].
Tensor empty_like_o(const Problem& p, const Tensor& q, bool heads_first, std::int32_t dtype) {
    if (p.ragged) return empty(q, {p.total_q, p.heads_q, p.head_dim_v}, dtype);
    if (heads_first) return empty_heads_first(q, {p.batch, p.heads_q, p.len_q, p.head_dim_v}, dtype);
    return empty(q, {p.batch, p.len_q, p.heads_q, p.head_dim_v}, dtype);
}

/// o in the shape of empty_like_o(); lse [batch, heads_q, len_q] | [heads_q, total_q], fp32 (fp64 for fp64 inputs),
/// contiguous. With `o_rest`, that becomes the rest of O for the backward, int8 in the shape of o, or of no elements
/// where the kernel doesn't write it.
Forward run_forward(const Inputs& in, const Settings& settings, OptionalTensor* o_rest = nullptr) {
    const Tensor& q = in.q;
    const Problem p = problem_of(in, settings, false);
    const auto dtype = torch_dtype_of(q);
    const auto lse_dtype = p.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
    Tensor o = empty_like_o(p, q, settings.heads_first, dtype);
    Tensor lse =
        p.ragged ? empty(q, {p.heads_q, p.total_q}, lse_dtype) : empty(q, {p.batch, p.heads_q, p.len_q}, lse_dtype);
    auto args = args_of<ForwardArgs>(in, settings.heads_first);
    args.o = rows_of("o", o, settings.heads_first);
    args.lse = view_of("lse", lse);
    if (o_rest != nullptr && is_16_bit(p.dtype)) {
        *o_rest = empty_like_o(p, q, settings.heads_first, aoti_torch_dtype_int8());
        args.o_rest = rows_of("o_rest", **o_rest, settings.heads_first);
    }
    run(p, Pass::forward, settings, q, args);
    if (o_rest != nullptr && !args.o_rest.given()) *o_rest = empty(q, {0}, aoti_torch_dtype_int8());
    return {std::move(o), std::move(lse)};
}

/// What the forward operators return: with the rest of O or without.
template <bool with_rest>
using Results = std::conditional_t<with_rest, std::tuple<Tensor, Tensor, Tensor>, Forward>;

template <bool with_rest>
Results<with_rest> forward_results(const Inputs& in, const Settings& settings) {
    if constexpr (!with_rest) return run_forward(in, settings);
    else {
        OptionalTensor o_rest;
        auto [o, lse] = run_forward(in, settings, &o_rest);
        return {std::move(o), std::move(lse), *std::move(o_rest)};
    }
}

/// In the shapes and dtypes of q, k, v and bias; dbias where it is asked for.
struct Gradients {
    Tensor dq, dk, dv;
    OptionalTensor dbias;
};

Gradients run_backward(const Tensor& d_o, const OptionalTensor& dlse, const Inputs& in, const Tensor& o,
                       const Tensor& lse, const OptionalTensor& o_rest, const Settings& settings, bool bias_gradient) {
    const bool heads_first = settings.heads_first;
    const Problem problem = problem_of(in, settings, bias_gradient);
    Gradients to{empty_like(in.q, heads_first), empty_like(in.k, heads_first), empty_like(in.v, heads_first), {}};
    auto args = args_of<BackwardArgs>(in, heads_first);
    args.o = rows_of("o", o, heads_first);
    args.lse = view_of("lse", lse);
    args.d_o = rows_of("do", d_o, heads_first);
    args.dlse = view_of("dlse", dlse);
    args.dq = rows_of("dq", to.dq, heads_first);
    args.dk = rows_of("dk", to.dk, heads_first);
    args.dv = rows_of("dv", to.dv, heads_first);
    if (bias_gradient) {
        to.dbias = empty_like(*in.bias);
        args.dbias = view_of("dbias", *to.dbias);
    }
    if (o_rest.has_value() && o_rest->numel() > 0) args.o_rest = rows_of("o_rest", *o_rest, heads_first);
    run(problem, Pass::backward, settings, in.q, args);
    return to;
}

// PyTorch boxes a function by its parameters, so that each operator has to list all of them.
template <bool with_rest>
Results<with_rest> forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                              const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                              const OptionalTensor cu_seqlens_kv, const OptionalTensor seed, std::int64_t max_len_q,
                              std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left,
                              std::int64_t window_right, std::optional<double> scale, double softcap, double dropout_p,
                              const std::optional<std::string> kernel, bool heads_first) {
    return with_torch_errors([&] {
        return forward_results<with_rest>(
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
                     const OptionalTensor o_rest) {
    return with_torch_errors([&]() -> Backward {
        Gradients found = run_backward(
            d_o, dlse, {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed}, o, lse, o_rest,
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first},
            bias_gradient);
        if (!bias_gradient) found.dbias = empty(q, {0}, torch_dtype_of(q));
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv), *std::move(found.dbias)};
    });
}

/// The same of what most calls have: PyTorch takes as long for a None as for a tensor.
struct PlainInputs {
    OptionalTensor none{};
    Inputs in;
    PlainInputs(const Tensor& q, const Tensor& k, const Tensor& v) : in{q, k, v, none, none, none, none, none} {}
};

Settings plain_settings(std::int64_t causal, bool heads_first, std::optional<double> scale, std::int64_t window_left,
                        std::int64_t window_right) {
    return {.causal = causal,
            .window_left = window_left,
            .window_right = window_right,
            .scale = scale,
            .heads_first = heads_first};
}

template <bool with_rest>
Results<with_rest> plain_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                            std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return forward_results<with_rest>(PlainInputs(q, k, v).in,
                                          plain_settings(causal, heads_first, scale, window_left, window_right));
    });
}

ThreeGradients plain_backward_op(const Tensor d_o, const Tensor q, const Tensor k, const Tensor v, const Tensor o,
                                 const Tensor lse, const OptionalTensor o_rest, std::int64_t causal, bool heads_first,
                                 std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&]() -> ThreeGradients {
        const PlainInputs inputs(q, k, v);
        Gradients found = run_backward(d_o, inputs.none, inputs.in, o, lse, o_rest,
                                       plain_settings(causal, heads_first, scale, window_left, window_right), false);
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv)};
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("forward", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("attention", TORCH_BOX(&tessera::torch_ops::forward_op<false>));
    m.impl("attention_with_rest", TORCH_BOX(&tessera::torch_ops::forward_op<true>));
    m.impl("backward", TORCH_BOX(&tessera::torch_ops::backward_op));
    m.impl("plain", TORCH_BOX(&tessera::torch_ops::plain_op<false>));
    m.impl("plain_with_rest", TORCH_BOX(&tessera::torch_ops::plain_op<true>));
    m.impl("plain_backward", TORCH_BOX(&tessera::torch_ops::plain_backward_op));
}
