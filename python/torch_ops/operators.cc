// SPDX-License-Identifier: Apache-2.0
//
// The operators tessera::forward, tessera::backward and tessera::attention on PyTorch's stable ABI. One source,
// compiled once for each dispatch key (TESSERA_TORCH_KEY). Fake kernels, gradients and the vmap rule are Python's
// (python/tessera/torch): the stable ABI has no words for them.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "call.hpp"

namespace tessera::torch_ops {
namespace {

/// o [batch, len_q, heads_q, head_dim_v] | [total_q, heads_q, head_dim_v]; lse [batch, heads_q, len_q] |
/// [heads_q, total_q], fp32 (fp64 for fp64 inputs). Both are contiguous.
std::tuple<Tensor, Tensor> forward_op(const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
                                      const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
                                      const OptionalTensor cu_seqlens_kv, const OptionalTensor seed,
                                      std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal,
                                      std::int64_t window_left, std::int64_t window_right, std::optional<double> scale,
                                      double softcap, double dropout_p, const std::optional<std::string> kernel) {
    return with_torch_errors([&]() -> std::tuple<Tensor, Tensor> {
        const Settings settings{max_len_q, max_len_kv, causal,    window_left, window_right,
                                scale,     softcap,    dropout_p, kernel};
        const Inputs in{q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed};
        const Problem problem = problem_of(in, settings, false);
        const auto dtype = torch_dtype_of(q);
        const auto lse_dtype = problem.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
        Tensor o = problem.ragged
                       ? empty(q, {problem.total_q, problem.heads_q, problem.head_dim_v}, dtype)
                       : empty(q, {problem.batch, problem.len_q, problem.heads_q, problem.head_dim_v}, dtype);
        Tensor lse = problem.ragged ? empty(q, {problem.heads_q, problem.total_q}, lse_dtype)
                                    : empty(q, {problem.batch, problem.heads_q, problem.len_q}, lse_dtype);
        auto args = args_of<ForwardArgs>(in);
        args.o = view_of("o", o);
        args.lse = view_of("lse", lse);
        run(problem, Pass::forward, settings, q, args);
        return {o, lse};
    });
}

/// dq, dk, dv and dbias, contiguous, in the shapes and dtypes of q, k, v and bias; dbias is empty unless asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor d_o, const OptionalTensor dlse, const Tensor q, const Tensor k, const Tensor v, const Tensor o,
    const Tensor lse, const OptionalTensor bias, const OptionalTensor alibi_slopes, const OptionalTensor cu_seqlens_q,
    const OptionalTensor cu_seqlens_kv, const OptionalTensor seed, std::int64_t max_len_q, std::int64_t max_len_kv,
    std::int64_t causal, std::int64_t window_left, std::int64_t window_right, std::optional<double> scale,
    double softcap, double dropout_p, const std::optional<std::string> kernel, bool bias_gradient) {
    return with_torch_errors([&]() -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
        const Settings settings{max_len_q, max_len_kv, causal,    window_left, window_right,
                                scale,     softcap,    dropout_p, kernel};
        const Inputs in{q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed};
        const Problem problem = problem_of(in, settings, bias_gradient);
        Tensor dq = empty_like(q);
        Tensor dk = empty_like(k);
        Tensor dv = empty_like(v);
        Tensor dbias = bias_gradient ? empty_like(*bias) : empty(q, {0}, torch_dtype_of(q));
        auto args = args_of<BackwardArgs>(in);
        args.o = view_of("o", o);
        args.lse = view_of("lse", lse);
        args.d_o = view_of("do", d_o);
        args.dlse = view_of("dlse", dlse);
        args.dq = view_of("dq", dq);
        args.dk = view_of("dk", dk);
        args.dv = view_of("dv", dv);
        if (bias_gradient) args.dbias = view_of("dbias", dbias);
        run(problem, Pass::backward, settings, q, args);
        return {dq, dk, dv, dbias};
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("forward", TORCH_BOX(&tessera::torch_ops::forward_op));
    m.impl("attention", TORCH_BOX(&tessera::torch_ops::forward_op));
    m.impl("backward", TORCH_BOX(&tessera::torch_ops::backward_op));
}
