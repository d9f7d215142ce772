// SPDX-License-Identifier: Apache-2.0
#include "results.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>

namespace tessera::torch_ops {
namespace {

/// A new tensor in the shape of Results::o.
Tensor empty_like_o(const Problem& p, TensorRef q, bool heads_first, std::int32_t dtype) {
    if (p.ragged) return empty(q, {p.total_q, p.heads_q, p.head_dim_v}, dtype);
    if (heads_first) return empty_heads_first(q, {p.batch, p.heads_q, p.len_q, p.head_dim_v}, dtype);
    return empty(q, {p.batch, p.len_q, p.heads_q, p.head_dim_v}, dtype);
}

/// Where the residual of O begins in memory that has LSE before it.
std::int64_t bytes_of_lse(const Problem& p) {
    constexpr std::int64_t kAlignment = 256;
    const std::int64_t bytes = p.batch * p.heads_q * p.len_q * std::int64_t{sizeof(float)};
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::int64_t elements_of_o(const Problem& p) { return p.batch * p.len_q * p.heads_q * p.head_dim_v; }

/// Whether a tensor has the bytes of LSE, or those and the residual of O.
bool is_together(const Problem& p, TensorRef memory) {
    if (p.ragged || memory.dtype() != aoti_torch_dtype_int8() || memory.dim() != 1) return false;
    const std::int64_t more = memory.numel() - bytes_of_lse(p);
    return memory.stride(0) == 1 && (more == 0 || more == elements_of_o(p));
}

/// LSE and, where there are bytes for it, the residual of O, which lies as [batch, len_q, heads_q, head_dim_v].
struct Together {
    TensorView lse, o_residual;

    Together(const Problem& p, TensorRef memory) : lse(view_of("lse", memory)) {
        if (lse.shape[0] > bytes_of_lse(p)) {
            o_residual = lse;
            o_residual.data = static_cast<std::byte*>(lse.data) + bytes_of_lse(p);
            o_residual.rank = 4;
            o_residual.shape = {p.batch, p.len_q, p.heads_q, p.head_dim_v};
            o_residual.strides = {p.len_q * p.heads_q * p.head_dim_v, p.heads_q * p.head_dim_v, p.head_dim_v, 1};
        }
        lse.dtype = DType::fp32;
        lse.rank = 3;
        lse.shape = {p.batch, p.heads_q, p.len_q};
        lse.strides = {p.heads_q * p.len_q, p.len_q, 1};
    }
};

/// The first `bytes` of a tensor of bytes, in the same memory.
Tensor first_of(const Tensor& memory, std::int64_t bytes) {
    const std::int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(memory.get(), 1, &bytes, &stride, 0, &handle));
    return Tensor(handle);
}

}  // namespace

Results run_forward(const Inputs& in, const Settings& settings, const Wanted& wanted) {
    const TensorRef q = in.q;
    const Problem p = problem_of(in, settings, false);
    const std::int32_t dtype = q.dtype();
    Results to{empty_like_o(p, q, settings.heads_first, dtype), {}, {}};
    auto args = args_of<ForwardArgs>(in, settings.heads_first);
    args.o = rows_of("o", to.o, settings.heads_first);
    if (wanted.together) {
        to.lse = empty(q, {bytes_of_lse(p) + elements_of_o(p)}, aoti_torch_dtype_int8());
        const Together views(p, to.lse);
        args.lse = views.lse;
        args.o_residual = views.o_residual;
        run(p, Pass::forward, settings, q, args);
        if (!args.o_residual.given()) to.lse = first_of(*to.lse, bytes_of_lse(p));
        return to;
    }
    if (wanted.lse) {
        const auto lse_dtype = p.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
        to.lse =
            p.ragged ? empty(q, {p.heads_q, p.total_q}, lse_dtype) : empty(q, {p.batch, p.heads_q, p.len_q}, lse_dtype);
        args.lse = view_of("lse", to.lse);
    }
    if (wanted.rest && is_16_bit(p.dtype)) {
        to.o_residual = empty_like_o(p, q, settings.heads_first, aoti_torch_dtype_int8());
        args.o_residual = rows_of("o_residual", to.o_residual, settings.heads_first);
    }
    run(p, Pass::forward, settings, q, args);
    if (wanted.rest && !args.o_residual.given()) to.o_residual = empty(q, {0}, aoti_torch_dtype_int8());
    return to;
}

Gradients run_backward(TensorRef d_o, TensorRef dlse, const Inputs& in, TensorRef o, TensorRef lse,
                       TensorRef o_residual, const Settings& settings, bool bias_gradient) {
    const bool heads_first = settings.heads_first;
    const Problem problem = problem_of(in, settings, bias_gradient);
    Gradients to{empty_like(in.q, heads_first), empty_like(in.k, heads_first), empty_like(in.v, heads_first), {}};
    auto args = args_of<BackwardArgs>(in, heads_first);
    args.o = rows_of("o", o, heads_first);
    if (is_together(problem, lse)) {
        const Together views(problem, lse);
        args.lse = views.lse;
        args.o_residual = views.o_residual;
    } else {
        args.lse = view_of("lse", lse);
    }
    args.d_o = rows_of("do", d_o, heads_first);
    args.dlse = view_of("dlse", dlse);
    args.dq = rows_of("dq", to.dq, heads_first);
    args.dk = rows_of("dk", to.dk, heads_first);
    args.dv = rows_of("dv", to.dv, heads_first);
    if (bias_gradient) {
        to.dbias = empty_like(in.bias);
        args.dbias = view_of("dbias", to.dbias);
    }
    if (o_residual.has_value() && o_residual.numel() > 0)
        args.o_residual = rows_of("o_residual", o_residual, heads_first);
    run(problem, Pass::backward, settings, in.q, args);
    return to;
}

}  // namespace tessera::torch_ops
