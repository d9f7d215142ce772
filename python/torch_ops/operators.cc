// SPDX-License-Identifier: Apache-2.0
//
// The operators of schema.cc on PyTorch's stable ABI. One source, compiled once for each dispatch key
// (TESSERA_TORCH_KEY). Fake kernels, gradients and the vmap rule are Python's (python/tessera/torch): the stable ABI
// has no words for them.
#include <torch/csrc/stable/library.h>

#include <bit>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

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

/// What a forward is to give beside O.
struct Wanted {
    bool lse = true;
    bool rest = false;
};

/// o in the shape of empty_like_o(); lse [batch, heads_q, len_q] | [heads_q, total_q], fp32 (fp64 for fp64 inputs),
/// contiguous; o_rest, the rest of O for the backward: int8 in the shape of o, or of no elements where the kernel
/// doesn't write it.
struct Results {
    Tensor o;
    OptionalTensor lse, o_rest;
};

Results run_forward(const Inputs& in, const Settings& settings, const Wanted& wanted) {
    const Tensor& q = in.q;
    const Problem p = problem_of(in, settings, false);
    const auto dtype = torch_dtype_of(q);
    Results to{empty_like_o(p, q, settings.heads_first, dtype), {}, {}};
    auto args = args_of<ForwardArgs>(in, settings.heads_first);
    args.o = rows_of("o", to.o, settings.heads_first);
    if (wanted.lse) {
        const auto lse_dtype = p.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
        to.lse =
            p.ragged ? empty(q, {p.heads_q, p.total_q}, lse_dtype) : empty(q, {p.batch, p.heads_q, p.len_q}, lse_dtype);
        args.lse = view_of("lse", *to.lse);
    }
    if (wanted.rest && is_16_bit(p.dtype)) {
        to.o_rest = empty_like_o(p, q, settings.heads_first, aoti_torch_dtype_int8());
        args.o_rest = rows_of("o_rest", *to.o_rest, settings.heads_first);
    }
    run(p, Pass::forward, settings, q, args);
    if (wanted.rest && !args.o_rest.given()) to.o_rest = empty(q, {0}, aoti_torch_dtype_int8());
    return to;
}

/// What the forward operators return: with the rest of O or without.
template <bool with_rest>
using Returned = std::conditional_t<with_rest, std::tuple<Tensor, Tensor, Tensor>, Forward>;

template <bool with_rest>
Returned<with_rest> forward_results(const Inputs& in, const Settings& settings) {
    Results found = run_forward(in, settings, {.rest = with_rest});
    if constexpr (with_rest) return {std::move(found.o), *std::move(found.lse), *std::move(found.o_rest)};
    else return {std::move(found.o), *std::move(found.lse)};
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
Returned<with_rest> forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
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
Returned<with_rest> plain_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                             std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return forward_results<with_rest>(PlainInputs(q, k, v).in,
                                          plain_settings(causal, heads_first, scale, window_left, window_right));
    });
}

/// Without LSE, for calls that drop it: a tensor less to allocate and to hand to Python.
Tensor plain_o_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, bool heads_first,
                  std::optional<double> scale, std::int64_t window_left, std::int64_t window_right) {
    return with_torch_errors([&] {
        return run_forward(PlainInputs(q, k, v).in,
                           plain_settings(causal, heads_first, scale, window_left, window_right), {.lse = false})
            .o;
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

// PyTorch's operator for backends that bring an attention of their own. It is the one way to a gradient that autograd
// knows without Python: the stable ABI has no words for those. PyTorch has no kernel of it for the CPU or CUDA and
// never calls it there, and tessera calls it for a plain call only. So one argument has another meaning: `attn_bias`
// are FusedSettings. PyTorch takes longer for each argument more. The others are to have their defaults. The backward
// gets the rest of O as its philox_seed.
using Fused = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t, std::int64_t, Tensor, Tensor, Tensor>;

/// Seven int64 in host memory (python/tessera/torch/_fused.py makes them), and what they say.
struct FusedSettings {
    Settings settings;
    std::int64_t least_for_rest;  ///< elements of q times keys from which on the rest of O is kept

    explicit FusedSettings(const Tensor& numbers) {
        const TensorView view = view_of("attn_bias", numbers);
        if (view.device.type != DeviceType::cpu || view.dtype != DType::int64 || view.rank != 1 || view.shape[0] != 7) {
            invalid("attn_bias", "expected tessera's settings, int64 [7] in host memory, got " + view.describe());
        }
        const auto at = [&](std::int64_t i) { return *view.at<std::int64_t>(i); };
        const bool has_scale = at(4) != 0;
        settings = plain_settings(at(0), at(1) != 0,
                                  has_scale ? std::optional(std::bit_cast<double>(at(5))) : std::nullopt, at(2), at(3));
        least_for_rest = at(6);
    }

    /// Where kernels write and read it: keeps_rest() and pays_rest() of python/tessera/torch/_operators.py.
    bool keeps_rest(const Tensor& q, const Tensor& k) const {
        if (!q.is_cuda() || dtype_of("q", q) != DType::bf16 || k.dim() != 4) return false;
        return q.numel() * k.size(settings.heads_first ? 2 : 1) >= least_for_rest;
    }
};

Fused fused_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor numbers, double dropout_p,
               bool is_causal, bool return_debug_mask, std::optional<double> scale) {
    return with_torch_errors([&]() -> Fused {
        if (!numbers.has_value()) invalid("attn_bias", "expected tessera's settings, int64 [7], got none");
        if (dropout_p != 0 || is_causal || return_debug_mask || scale.has_value()) {
            invalid("attn_bias", "expected no other settings beside tessera's");
        }
        const FusedSettings given(*numbers);
        Results found = run_forward(PlainInputs(q, k, v).in, given.settings, {.rest = given.keeps_rest(q, k)});
        const Tensor none;
        Tensor rest = found.o_rest.has_value() ? *std::move(found.o_rest) : none;
        return {std::move(found.o), *std::move(found.lse), none, none, 0, 0, std::move(rest), none, none};
    });
}

Backward fused_backward_op(const Tensor d_o, const Tensor q, const Tensor k, const Tensor v, const Tensor numbers,
                           const std::vector<bool> /*wanted*/, const Tensor o, const Tensor lse,
                           const Tensor /*cum_seq_q*/, const Tensor /*cum_seq_k*/, std::int64_t /*max_q*/,
                           std::int64_t /*max_k*/, double /*dropout_p*/, bool /*is_causal*/, const Tensor rest,
                           const Tensor /*philox_offset*/, std::optional<double> /*scale*/) {
    return with_torch_errors([&]() -> Backward {
        if (!d_o.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};  // O has no gradient: nor have they
        const PlainInputs inputs(q, k, v);
        const OptionalTensor o_rest = rest.defined() ? OptionalTensor(rest) : std::nullopt;
        Gradients found =
            run_backward(d_o, inputs.none, inputs.in, o, lse, o_rest, FusedSettings(numbers).settings, false);
        return {std::move(found.dq), std::move(found.dk), std::move(found.dv), Tensor()};
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
    m.impl("plain_o", TORCH_BOX(&tessera::torch_ops::plain_o_op));
}

STABLE_TORCH_LIBRARY_IMPL(aten, TESSERA_TORCH_KEY, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_BOX(&tessera::torch_ops::fused_op));
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
           TORCH_BOX(&tessera::torch_ops::fused_backward_op));
}
