// SPDX-License-Identifier: Apache-2.0
//
// Operators of context parallelism (python/tessera/torch/_context_parallel): the kernels write into parts of tensors
// that exist, and partial gradients are added.
#include <torch/csrc/stable/library.h>

#include "call.hpp"
#include "tessera/context_parallel.hpp"

namespace tessera::torch_ops {
namespace {

/// Returns whether the kernel wrote o_residual; without one false.
bool forward_to_op(const Tensor o, const Tensor lse, const OptionalTensor o_residual, const Tensor q, const Tensor k,
                   const Tensor v, const OptionalTensor cu_seqlens_q, const OptionalTensor cu_seqlens_kv,
                   std::int64_t max_len_q, std::int64_t max_len_kv, std::int64_t causal, std::int64_t window_left,
                   std::int64_t window_right, std::optional<double> scale, double softcap,
                   const std::optional<std::string> kernel) {
    return with_torch_errors([&] {
        const Inputs in{.q = q, .k = k, .v = v, .cu_seqlens_q = cu_seqlens_q, .cu_seqlens_kv = cu_seqlens_kv};
        const Settings settings{.max_len_q = max_len_q,
                                .max_len_kv = max_len_kv,
                                .causal = causal,
                                .window_left = window_left,
                                .window_right = window_right,
                                .scale = scale,
                                .softcap = softcap,
                                .kernel = kernel};
        auto args = args_of<ForwardArgs>(in, false);
        args.o = rows_of("o", o, false);
        args.lse = view_of("lse", lse);
        if (o_residual.has_value()) args.o_residual = rows_of("o_residual", *o_residual, false);
        const Copyable inputs[] = {{"q", in.q, &args.q}, {"k", in.k, &args.k}, {"v", in.v, &args.v}};
        run(problem_of(in, settings, false), Pass::forward, settings, inputs, args);
        return args.o_residual.given();
    });
}

void backward_to_op(const Tensor dq, const Tensor dk, const Tensor dv, const Tensor d_o, const OptionalTensor dlse,
                    const Tensor q, const Tensor k, const Tensor v, const Tensor o, const Tensor lse,
                    const OptionalTensor o_residual, const OptionalTensor cu_seqlens_q,
                    const OptionalTensor cu_seqlens_kv, std::int64_t max_len_q, std::int64_t max_len_kv,
                    std::int64_t causal, std::int64_t window_left, std::int64_t window_right,
                    std::optional<double> scale, double softcap, const std::optional<std::string> kernel) {
    with_torch_errors([&] {
        const Inputs in{.q = q, .k = k, .v = v, .cu_seqlens_q = cu_seqlens_q, .cu_seqlens_kv = cu_seqlens_kv};
        const Settings settings{.max_len_q = max_len_q,
                                .max_len_kv = max_len_kv,
                                .causal = causal,
                                .window_left = window_left,
                                .window_right = window_right,
                                .scale = scale,
                                .softcap = softcap,
                                .kernel = kernel};
        auto args = args_of<BackwardArgs>(in, false);
        args.o = rows_of("o", o, false);
        args.lse = view_of("lse", lse);
        args.d_o = rows_of("do", d_o, false);
        args.dlse = view_of("dlse", dlse);
        args.dq = rows_of("dq", dq, false);
        args.dk = rows_of("dk", dk, false);
        args.dv = rows_of("dv", dv, false);
        if (o_residual.has_value()) args.o_residual = rows_of("o_residual", *o_residual, false);
        const Copyable inputs[] = {
            {"q", in.q, &args.q}, {"k", in.k, &args.k}, {"v", in.v, &args.v}, {"do", d_o, &args.d_o}};
        run(problem_of(in, settings, false), Pass::backward, settings, inputs, args);
    });
}

void add_parts_op(const Tensor dk, const Tensor dv, const Tensor parts, const Tensor first, const Tensor sources) {
    with_torch_errors([&] {
        add_parts(view_of("parts", parts), view_of("first", first), view_of("sources", sources), view_of("dk", dk),
                  view_of("dv", dv), execution_of(TensorRef(dk)));
    });
}

void copy_rows_op(const Tensor first, const Tensor second, const Tensor k, const Tensor v, const Tensor from,
                  const Tensor to) {
    with_torch_errors([&] {
        copy_rows(view_of("first", first), view_of("second", second), view_of("k", k), view_of("v", v),
                  view_of("from", from), view_of("to", to), execution_of(TensorRef(k)));
    });
}

}  // namespace
}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(tessera, TESSERA_TORCH_KEY, m) {
    m.impl("forward_to", TORCH_BOX(&tessera::torch_ops::forward_to_op));
    m.impl("backward_to", TORCH_BOX(&tessera::torch_ops::backward_to_op));
    m.impl("copy_rows", TORCH_BOX(&tessera::torch_ops::copy_rows_op));
    m.impl("add_parts", TORCH_BOX(&tessera::torch_ops::add_parts_op));
}
