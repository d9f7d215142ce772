// SPDX-License-Identifier: Apache-2.0
//
// XLA FFI handlers over the C ABI, for buffers of the host. python/tessera/jax.py registers and calls them. Buffers are
// dense and row-major; the workspace is one of the results, so XLA allocates it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tessera/tessera.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

/// The C ABI's code of an element type, or -1, which every call refuses.
std::int32_t dtype_of(ffi::DataType type) {
    switch (type) {
        case ffi::F64: return TESSERA_FP64;
        case ffi::F32: return TESSERA_FP32;
        case ffi::F16: return TESSERA_FP16;
        case ffi::BF16: return TESSERA_BF16;
        default: return -1;
    }
}

tessera_tensor tensor_of(ffi::AnyBuffer buffer) {
    const auto shape = buffer.dimensions();
    tessera_tensor tensor{};
    tensor.data = buffer.untyped_data();
    tensor.dtype = dtype_of(buffer.element_type());
    tensor.rank = static_cast<std::int32_t>(shape.size());  // the call refuses more than TESSERA_MAX_RANK
    std::int64_t stride = 1;
    for (std::size_t d = std::min<std::size_t>(shape.size(), TESSERA_MAX_RANK); d-- > 0;) {
        tensor.shape[d] = shape[d];
        tensor.strides[d] = stride;
        stride *= shape[d];
    }
    return tensor;
}

ffi::Error error_of(tessera_status status) {
    if (status == TESSERA_OK) return ffi::Error::Success();
    const auto code = status == TESSERA_INVALID_ARGUMENT || status == TESSERA_UNSUPPORTED
                          ? ffi::ErrorCode::kInvalidArgument
                          : ffi::ErrorCode::kInternal;
    return ffi::Error(code, tessera_last_error());
}

/// The attributes that jax.py passes beside the arrays.
struct Scores {
    std::int32_t causal;
    std::int64_t window_left;
    std::int64_t window_right;
    double scale;
    double softcap;
};

tessera_problem problem_of(const Scores& scores, const tessera_tensor& q, const tessera_tensor& k,
                           const tessera_tensor& v) {
    tessera_problem problem;
    tessera_problem_init(&problem, sizeof problem);
    problem.dtype = q.dtype;
    problem.batch = q.shape[0];
    problem.len_q = q.shape[1];
    problem.len_kv = k.shape[1];
    problem.heads_q = q.shape[2];
    problem.heads_kv = k.shape[2];
    problem.head_dim = q.shape[3];
    problem.head_dim_v = v.shape[3];
    problem.causal = scores.causal;
    problem.window_left = scores.window_left;
    problem.window_right = scores.window_right;
    problem.scale = scores.scale;
    problem.softcap = scores.softcap;
    return problem;
}

ffi::Error forward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::RemainingArgs optional,
                   ffi::Result<ffi::AnyBuffer> o, ffi::Result<ffi::AnyBuffer> lse,
                   ffi::Result<ffi::AnyBuffer> workspace, std::int32_t causal, std::int64_t window_left,
                   std::int64_t window_right, double scale, double softcap) {
    tessera_forward_args args{};
    args.struct_size = sizeof args;
    args.q = tensor_of(q), args.k = tensor_of(k), args.v = tensor_of(v);
    args.o = tensor_of(*o), args.lse = tensor_of(*lse);
    tessera_problem problem = problem_of({causal, window_left, window_right, scale, softcap}, args.q, args.k, args.v);
    if (optional.size() > 0) {
        const auto bias = optional.get<ffi::AnyBuffer>(0);
        if (bias.has_error()) return bias.error();
        args.bias = tensor_of(*bias);
        problem.bias = 1;
    }
    return error_of(
        tessera_forward(&problem, nullptr, &args, workspace->untyped_data(), workspace->size_bytes(), nullptr));
}

ffi::Error backward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer o, ffi::AnyBuffer lse,
                    ffi::AnyBuffer d_o, ffi::AnyBuffer dlse, ffi::RemainingArgs optional,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<ffi::AnyBuffer> workspace, ffi::RemainingRets optional_results, std::int32_t causal,
                    std::int64_t window_left, std::int64_t window_right, double scale, double softcap) {
    tessera_backward_args args{};
    args.struct_size = sizeof args;
    args.q = tensor_of(q), args.k = tensor_of(k), args.v = tensor_of(v);
    args.o = tensor_of(o), args.lse = tensor_of(lse);
    args.d_o = tensor_of(d_o), args.dlse = tensor_of(dlse);
    args.dq = tensor_of(*dq), args.dk = tensor_of(*dk), args.dv = tensor_of(*dv);
    tessera_problem problem = problem_of({causal, window_left, window_right, scale, softcap}, args.q, args.k, args.v);
    if (optional.size() > 0) {
        const auto bias = optional.get<ffi::AnyBuffer>(0);
        if (bias.has_error()) return bias.error();
        auto dbias = optional_results.get<ffi::AnyBuffer>(0);
        if (dbias.has_error()) return dbias.error();
        args.bias = tensor_of(*bias);
        args.dbias = tensor_of(**dbias);
        problem.bias = problem.bias_gradient = 1;
    }
    return error_of(
        tessera_backward(&problem, nullptr, &args, workspace->untyped_data(), workspace->size_bytes(), nullptr));
}

}  // namespace

#define TESSERA_SCORES(binding)             \
    binding.Attr<std::int32_t>("causal")    \
        .Attr<std::int64_t>("window_left")  \
        .Attr<std::int64_t>("window_right") \
        .Attr<double>("scale")              \
        .Attr<double>("softcap")

XLA_FFI_DEFINE_HANDLER_SYMBOL(tessera_jax_forward, forward,
                              TESSERA_SCORES(ffi::Ffi::Bind()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .Ret<ffi::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(tessera_jax_backward, backward,
                              TESSERA_SCORES(ffi::Ffi::Bind()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .Arg<ffi::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .Ret<ffi::AnyBuffer>()
                                                 .RemainingRets()));
