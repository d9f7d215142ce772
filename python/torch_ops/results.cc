// SPDX-License-Identifier: Apache-2.0
#include "results.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

namespace tessera::torch_ops {
namespace {

/// A new tensor in the shape of Results::o.
Tensor empty_like_o(const Problem& p, TensorRef q, bool heads_first, std::int32_t dtype) {
    if (p.ragged) return empty(q, {p.total_q, p.heads_q, p.head_dim_v}, dtype);
    if (heads_first) return empty_heads_first(q, {p.batch, p.heads_q, p.len_q, p.head_dim_v}, dtype);
    return empty(q, {p.batch, p.len_q, p.heads_q, p.head_dim_v}, dtype);
}

/// Gives rows past the last sequence of a ragged call O = 0 and LSE = -inf: no kernel writes them. On CUDA the host
/// does not read the offsets.
void fill_rows_behind(const Problem& p, const ForwardArgs& args) {
    if (!p.ragged || args.q.device.type != DeviceType::cpu || p.total_q == 0) return;
    const TensorView& cu = args.cu_seqlens_q;
    if (cu.rank != 1 || cu.shape[0] <= p.batch || (cu.dtype != DType::int32 && cu.dtype != DType::int64))
        return;  // an error of the call
    const std::int64_t last =
        cu.dtype == DType::int32 ? *cu.at<const std::int32_t>(p.batch) : *cu.at<const std::int64_t>(p.batch);
    if (last < 0 || last >= p.total_q) return;
    for (const TensorView* o : {&args.o, &args.o_residual}) {
        if (!o->given() || o->size() == 0) continue;
        const std::int64_t row = o->strides[0] * size_of(o->dtype);
        std::memset(static_cast<char*>(o->data) + last * row, 0, static_cast<std::size_t>((p.total_q - last) * row));
    }
    for (std::int64_t h = 0; args.lse.given() && h < p.heads_q; ++h) {
        if (args.lse.dtype == DType::fp64)
            std::fill(args.lse.at<double>(h, last), args.lse.at<double>(h, p.total_q), -HUGE_VAL);
        else std::fill(args.lse.at<float>(h, last), args.lse.at<float>(h, p.total_q), -HUGE_VALF);
    }
}

/// Whether elements of the tensor share memory by a stride of 0.
bool repeats_elements(TensorRef tensor) {
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
        if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
    }
    return false;
}

}  // namespace

Results run_forward(const Inputs& in, const Settings& settings, const Wanted& wanted) {
    const TensorRef q = in.q;
    const Problem p = problem_of(in, settings, false);
    const std::int32_t dtype = q.dtype();
    Results to{empty_like_o(p, q, settings.heads_first, dtype), {}, {}};
    auto args = args_of<ForwardArgs>(in, settings.heads_first);
    args.o = rows_of("o", to.o, settings.heads_first);
    if (wanted.lse) {
        const auto lse_dtype = p.dtype == DType::fp64 ? dtype : aoti_torch_dtype_float32();
        to.lse =
            p.ragged ? empty(q, {p.heads_q, p.total_q}, lse_dtype) : empty(q, {p.batch, p.heads_q, p.len_q}, lse_dtype);
        args.lse = view_of("lse", to.lse);
    }
    if (wanted.residual && is_16_bit(p.dtype)) {
        to.o_residual = empty_like_o(p, q, settings.heads_first, aoti_torch_dtype_int8());
        args.o_residual = rows_of("o_residual", to.o_residual, settings.heads_first);
    }
    fill_rows_behind(p, args);
    const Copyable inputs[] = {{"q", in.q, &args.q}, {"k", in.k, &args.k}, {"v", in.v, &args.v}};
    run(p, Pass::forward, settings, inputs, args);
    if (wanted.residual && !args.o_residual.given()) to.o_residual = empty(q, {0}, aoti_torch_dtype_int8());
    return to;
}

Gradients run_backward(const Tensor& d_o, TensorRef dlse, const Inputs& in, TensorRef o, TensorRef lse,
                       TensorRef o_residual, const Settings& settings, bool bias_gradient) {
    const bool heads_first = settings.heads_first;
    if (bias_gradient && !in.bias.has_value()) invalid("bias_gradient", "expected false without a bias, got true");
    const Problem problem = problem_of(in, settings, bias_gradient);
    Gradients to{empty_like(in.q, heads_first), empty_like(in.k, heads_first), empty_like(in.v, heads_first), {}, {}};
    auto args = args_of<BackwardArgs>(in, heads_first);
    args.o = rows_of("o", o, heads_first);
    args.lse = view_of("lse", lse);
    std::optional<Tensor> copy;
    if (TensorRef(d_o).is_cuda() && repeats_elements(d_o)) copy = torch::stable::contiguous(d_o);
    args.d_o = rows_of("do", copy.has_value() ? *copy : d_o, heads_first);
    args.dlse = view_of("dlse", dlse);
    args.dq = rows_of("dq", to.dq, heads_first);
    args.dk = rows_of("dk", to.dk, heads_first);
    args.dv = rows_of("dv", to.dv, heads_first);
    if (bias_gradient) {
        to.dbias = empty_like(in.bias);
        args.dbias = view_of("dbias", to.dbias);
    }
    if (in.sinks.has_value()) {
        to.dsinks = empty_like(in.sinks);
        args.dsinks = view_of("dsinks", to.dsinks);
    }
    if (o_residual.has_value() && o_residual.numel() > 0)
        args.o_residual = rows_of("o_residual", o_residual, heads_first);
    const Copyable inputs[] = {
        {"q", in.q, &args.q}, {"k", in.k, &args.k}, {"v", in.v, &args.v}, {"do", d_o, &args.d_o}};
    run(problem, Pass::backward, settings, inputs, args);
    return to;
}

}  // namespace tessera::torch_ops
