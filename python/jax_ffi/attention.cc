// SPDX-License-Identifier: Apache-2.0
//
// XLA FFI handlers over the C ABI: of each pass one for buffers of the host and one for buffers of a CUDA device.
// python/tessera/_jax_calls.py registers and calls them. Buffers are dense and row-major; the workspace is one of the
// results, so XLA allocates it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

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
        case ffi::S8: return TESSERA_INT8;
        default: return -1;
    }
}

/// The device of a call, and the stream that orders it there.
struct Target {
    std::int32_t device_type = TESSERA_CPU;
    std::int32_t device_index = 0;
    void* stream = nullptr;  ///< cudaStream_t
};

tessera_tensor tensor_of(ffi::AnyBuffer buffer, const Target& target) {
    const auto shape = buffer.dimensions();
    tessera_tensor tensor{};
    tensor.data = buffer.untyped_data();
    tensor.device_type = target.device_type;
    tensor.device_index = target.device_index;
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

/// The attributes that _jax_calls.py passes beside the arrays.
struct Scores {
    std::int32_t causal;
    std::int64_t window_left;
    std::int64_t window_right;
    double scale;
    double softcap;
    std::int32_t bias;        ///< 1: the first optional argument, and in the backward the first optional result
    std::int32_t o_residual;  ///< 1: the last optional result of the forward and argument of the backward
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

using Result = ffi::Result<ffi::AnyBuffer>;

/// Calls tessera_forward or tessera_backward.
tessera_status call(const tessera_problem& problem, const tessera_options& options, const tessera_forward_args& args,
                    ffi::AnyBuffer workspace, void* stream) {
    return tessera_forward(&problem, &options, &args, workspace.untyped_data(), workspace.size_bytes(), stream);
}

tessera_status call(const tessera_problem& problem, const tessera_options& options, const tessera_backward_args& args,
                    ffi::AnyBuffer workspace, void* stream) {
    return tessera_backward(&problem, &options, &args, workspace.untyped_data(), workspace.size_bytes(), stream);
}

tessera_options options_on(const Target& target) {
    tessera_options options{};
    options.struct_size = sizeof options;
    if (target.device_type == TESSERA_CUDA) options.backend = TESSERA_BACKEND_CUDA;
    return options;
}

/// Whether the forward kernel of the problem writes the residual of O.
bool writes_residual(const tessera_problem& problem, const Target& target) {
    const tessera_options options = options_on(target);
    tessera_plan_info info{};
    info.struct_size = sizeof info;
    return tessera_plan_query(&problem, &options, TESSERA_FORWARD, &info) == TESSERA_OK && info.o_residual != 0;
}

/// The first kernel after the planned one that could run the problem, or null.
const char* next_kernel(const tessera_problem& problem, const tessera_options& options, std::int32_t pass) {
    tessera_refusal refusal{};
    refusal.struct_size = sizeof refusal;
    for (std::int32_t i = 0; tessera_plan_refusal(&problem, &options, pass, i, &refusal) == TESSERA_OK; ++i) {
        if (refusal.capable != 0) return refusal.kernel;
    }
    return nullptr;
}

/// Runs a call. The next kernel runs where the planned CUDA kernel refuses the alignment of the rows; _jax_calls.py
/// makes the workspace large enough for both.
template <class Args>
ffi::Error run(const tessera_problem& problem, std::int32_t pass, const Args& args, ffi::AnyBuffer workspace,
               const Target& target) {
    tessera_options options = options_on(target);
    const tessera_status status = call(problem, options, args, workspace, target.stream);
    if (status != TESSERA_UNSUPPORTED || target.device_type == TESSERA_CPU) return error_of(status);
    const ffi::Error first = error_of(status);
    options.kernel = next_kernel(problem, options, pass);
    if (options.kernel == nullptr) return first;
    return error_of(call(problem, options, args, workspace, target.stream));
}

ffi::Error forward(const Target& target, const Scores& scores, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::RemainingArgs optional, Result o, Result lse, Result workspace,
                   ffi::RemainingRets optional_results) {
    tessera_forward_args args{};
    args.struct_size = sizeof args;
    args.q = tensor_of(q, target), args.k = tensor_of(k, target), args.v = tensor_of(v, target);
    args.o = tensor_of(*o, target), args.lse = tensor_of(*lse, target);
    tessera_problem problem = problem_of(scores, args.q, args.k, args.v);
    if (scores.bias != 0) {
        const auto bias = optional.get<ffi::AnyBuffer>(0);
        if (bias.has_error()) return bias.error();
        args.bias = tensor_of(*bias, target);
        problem.bias = 1;
    }
    if (scores.o_residual != 0 && writes_residual(problem, target)) {
        auto residual = optional_results.get<ffi::AnyBuffer>(0);
        if (residual.has_error()) return residual.error();
        args.o_residual = tensor_of(**residual, target);
    }
    return run(problem, TESSERA_FORWARD, args, *workspace, target);
}

ffi::Error backward(const Target& target, const Scores& scores, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer o, ffi::AnyBuffer lse, ffi::AnyBuffer d_o, ffi::AnyBuffer dlse,
                    ffi::RemainingArgs optional, Result dq, Result dk, Result dv, Result workspace,
                    ffi::RemainingRets optional_results) {
    tessera_backward_args args{};
    args.struct_size = sizeof args;
    args.q = tensor_of(q, target), args.k = tensor_of(k, target), args.v = tensor_of(v, target);
    args.o = tensor_of(o, target), args.lse = tensor_of(lse, target);
    args.d_o = tensor_of(d_o, target), args.dlse = tensor_of(dlse, target);
    args.dq = tensor_of(*dq, target), args.dk = tensor_of(*dk, target), args.dv = tensor_of(*dv, target);
    tessera_problem problem = problem_of(scores, args.q, args.k, args.v);
    if (scores.bias != 0) {
        const auto bias = optional.get<ffi::AnyBuffer>(0);
        if (bias.has_error()) return bias.error();
        auto dbias = optional_results.get<ffi::AnyBuffer>(0);
        if (dbias.has_error()) return dbias.error();
        args.bias = tensor_of(*bias, target);
        args.dbias = tensor_of(**dbias, target);
        problem.bias = 1;
    }
    if (scores.o_residual != 0 && writes_residual(problem, target)) {
        const auto residual = optional.get<ffi::AnyBuffer>(scores.bias != 0 ? 1 : 0);
        if (residual.has_error()) return residual.error();
        args.o_residual = tensor_of(*residual, target);
    }
    problem.bias_gradient = problem.bias;
    return run(problem, TESSERA_BACKWARD, args, *workspace, target);
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Scores, StructMember<std::int32_t>("causal"),
                                      StructMember<std::int64_t>("window_left"),
                                      StructMember<std::int64_t>("window_right"), StructMember<double>("scale"),
                                      StructMember<double>("softcap"), StructMember<std::int32_t>("bias"),
                                      StructMember<std::int32_t>("o_residual"));

namespace {

auto bind_device() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>(); }

template <class Binding>
auto bind_forward(Binding binding) {
    return std::move(binding)
        .template Attrs<Scores>()
        .template Arg<ffi::AnyBuffer>()  // q
        .template Arg<ffi::AnyBuffer>()  // k
        .template Arg<ffi::AnyBuffer>()  // v
        .RemainingArgs()
        .template Ret<ffi::AnyBuffer>()  // o
        .template Ret<ffi::AnyBuffer>()  // lse
        .template Ret<ffi::AnyBuffer>()  // workspace
        .RemainingRets();
}

template <class Binding>
auto bind_backward(Binding binding) {
    return std::move(binding)
        .template Attrs<Scores>()
        .template Arg<ffi::AnyBuffer>()  // q
        .template Arg<ffi::AnyBuffer>()  // k
        .template Arg<ffi::AnyBuffer>()  // v
        .template Arg<ffi::AnyBuffer>()  // o
        .template Arg<ffi::AnyBuffer>()  // lse
        .template Arg<ffi::AnyBuffer>()  // d_o
        .template Arg<ffi::AnyBuffer>()  // dlse
        .RemainingArgs()
        .template Ret<ffi::AnyBuffer>()  // dq
        .template Ret<ffi::AnyBuffer>()  // dk
        .template Ret<ffi::AnyBuffer>()  // dv
        .template Ret<ffi::AnyBuffer>()  // workspace
        .RemainingRets();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tessera_jax_forward, [](const auto&... call) { return forward({}, call...); }, bind_forward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tessera_jax_backward, [](const auto&... call) { return backward({}, call...); }, bind_backward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tessera_jax_forward_cuda,
    [](void* stream, std::int32_t device, const auto&... call) {
        return forward({TESSERA_CUDA, device, stream}, call...);
    },
    bind_forward(bind_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tessera_jax_backward_cuda,
    [](void* stream, std::int32_t device, const auto&... call) {
        return backward({TESSERA_CUDA, device, stream}, call...);
    },
    bind_backward(bind_device()));
