// SPDX-License-Identifier: Apache-2.0
//
// The operators tessera::forward, tessera::plain, tessera::backward and tessera::attention on PyTorch's stable ABI. One
// source, compiled once for each dispatch key (TESSERA_TORCH_KEY). Fake kernels, gradients and the vmap rule are
// Python's (python/tessera/torch): the stable ABI has no words for them.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "call.hpp"

namespace tessera::torch_ops {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// o [batch, len_q, heads_q, head_dim_v], [batch, heads_q, len_q, head_dim_v] with heads_first | [total_q, heads_q,
/// head_dim_v]; lse [batch, heads_q, len_q] | [heads_q, total_q], fp32 (fp64 for fp64 inputs), contiguous.
Forward run_forward(const Inputs& in, const Settings& settings) {
    const Tensor& q = in.q;
    const Problem p = problem_of(in, settings, false);
    const auto dtype = torch_dtype_of(q);
    const auto lse_dtype = p.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
    Tensor o = p.ragged               ? empty(q, {p.total_q, p.heads_q, p.head_dim_v}, dtype)
               : settings.heads_first ? empty_heads_first(q, {p.batch, p.heads_q, p.len_q, p.head_dim_v}, dtype)
                                      : empty(q, {p.batch, p.len_q, p.heads_q, p.head_dim_v}, dtype);
    Tensor lse =
        p.ragged ? empty(q, {p.heads_q, p.total_q}, lse_dtype) : empty(q, {p.batch, p.heads_q, p.len_q}, lse_dtype);
    auto args = args_of<ForwardArgs>(in, settings.heads_first);
    args.o = rows_of("o", o, settings.heads_first);
    args.lse = view_of("lse", lse);
    run(p, Pass::forward, settings, q, args);
    return {o, lse};
}

Forward forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                   const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                   const OptionalTensor cu_seqlens_kv, const OptionalTensor seed, std::int64_t max_len_q,
                   std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left, std::int64_t window_right,
                   std::optional<double> scale, double softcap, double dropout_p,
                   const std::optional<std::string> kernel, bool heads_first) {
    return with_torch_errors([&] {
        return run_forward(
            {q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed},
            {max_len_q, max_len_kv, causal, window_left, window_right, scale, softcap, dropout_p, kernel, heads_first});
    });
}

/// forward_op() of what most calls have: PyTorch takes as long for an argument that is left out as for one that is
/// there.
Forward plain_op(const Tensor q, const Tensor k, const Tensor v, std::int64_t causal, std::int64_t window_left,
                 std::int64_t window_right, std::optional<double> scale, bool heads_first) {
    return with_torch_errors([&] {
        const OptionalTensor none;
        return run_forward({q, k, v, none, none, none, none, none}, {.causal = causal,
                                                                     .window_left = window_left,
                                                                     .window_right = window_right,
                                                                     .scale = scale,
                                                                     .heads_first = heads_first});
    });
}

/// dq, dk, dv and dbias in the shapes and dtypes of q, k, v and bias; dbias is empty unless asked for.
Backward backward_op(const Tensor d_o, const OptionalTensor dlse, const Tensor q, const Tensor k, const Tensor v,
                     const Tensor o, const Tensor lse, const OptionalTensor bias, const OptionalTensor alibi_slopes,
                     const OptionalTensor cu_seqlens_q, const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                     std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left,
                     std::int64_t window_right, std::optional<double> scale, double softcap, double dropout_p,
                     const std::optional<std::string> kernel, bool bias_gradient, bool heads_first) {
    return with_torch_errors([&]() -> Backward {
        const Settings settings{max_len_q, max_len_kv, causal,    window_left, window_right,
                                scale,     softcap,    dropout_p, kernel,      heads_first};
        const Inputs in{q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed};
        const Problem problem = problem_of(in, settings, bias_gradient);
        Tensor dq = empty_like(q, heads_first);
        Tensor dk = empty_like(k, heads_first);
        Tensor dv = empty_like(v, heads_first);
        Tensor dbias = bias_gradient ? empty_like(*bias) : empty(q, {0}, torch_dtype_of(q));
        auto args = args_of<BackwardArgs>(in, heads_first);
        args.o = rows_of("o", o, heads_first);
        args.lse = view_of("lse", lse);
        args.d_o = rows_of("do", d_o, heads_first);
        args.dlse = view_of("dlse", dlse);
        args.dq = rows_of("dq", dq, heads_first);
        args.dk = rows_of("dk", dk, heads_first);
        args.dv = rows_of("dv", dv, heads_first);
        if (bias_gradient) args.dbias = view_of("dbias", dbias);
        run(problem, Pass::backward, settings, q, args);
        return {dq, dk, dv, dbias};
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("forward", TORCH_BOX(&tessera::torch_ops::forward_op));
    m.impl("plain", TORCH_BOX(&tessera::torch_ops::plain_op));
    m.impl("attention", TORCH_BOX(&tessera::torch_ops::forward_op));
    m.impl("backward", TORCH_BOX(&tessera::torch_ops::backward_op));
}
