// SPDX-License-Identifier: Apache-2.0
#include "tensors.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <utility>

namespace tessera::torch_ops {

DType dtype_of(const char* argument, const Tensor& tensor) {
    using torch::headeronly::ScalarType;
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return DType::fp32;
        case ScalarType::BFloat16: return DType::bf16;
        case ScalarType::Half: return DType::fp16;
        case ScalarType::Double: return DType::fp64;
        case ScalarType::Int: return DType::int32;
        case ScalarType::Long: return DType::int64;
        case ScalarType::Char: return DType::int8;
        default: break;
    }
    invalid(argument, "expected dtype float32, bfloat16, float16 or float64 (lengths: int32 or int64), got another");
}

namespace {

/// Where PyTorch says that the memory is: libtessera takes its word for it (Execution::placed).
Device device_of(const char* argument, const Tensor& tensor) {
    std::int32_t type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    if (type == aoti_torch_device_type_cpu()) return {};
    if (type == aoti_torch_device_type_cuda()) return {DeviceType::cuda, tensor.get_device_index()};
    invalid(argument, "expected a tensor on the CPU or a CUDA device, got one on another device");
}

}  // namespace

TensorView view_of(const char* argument, const Tensor& tensor) {
    const std::int64_t rank = tensor.dim();
    if (rank < 1 || rank > TensorView::kMaxRank) {
        invalid(argument,
                "expected 1.." + std::to_string(TensorView::kMaxRank) + " dimensions, got " + std::to_string(rank));
    }
    TensorView view{.data = const_cast<void*>(tensor.data_ptr()),
                    .dtype = dtype_of(argument, tensor),
                    .rank = static_cast<int>(rank),
                    .device = device_of(argument, tensor)};
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    for (std::size_t d = 0; d < static_cast<std::size_t>(rank); ++d) {
        view.shape[d] = sizes[d];
        view.strides[d] = strides[d];
    }
    return view;
}

TensorView rows_of(const char* argument, const Tensor& tensor, bool heads_first) {
    TensorView view = view_of(argument, tensor);
    if (heads_first && view.rank == 4) {
        std::swap(view.shape[1], view.shape[2]);
        std::swap(view.strides[1], view.strides[2]);
    }
    return view;
}

TensorView view_of(const char* argument, const OptionalTensor& tensor) {
    return tensor.has_value() ? view_of(argument, *tensor) : TensorView{};
}

std::int32_t torch_dtype_of(const Tensor& tensor) {
    std::int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

namespace {

Tensor empty_strided(const Tensor& like, std::span<const std::int64_t> shape, const std::int64_t* strides,
                     std::int32_t dtype) {
    std::int32_t device_type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(),
                                                           strides, dtype, device_type, like.get_device_index(),
                                                           &handle));
    return Tensor(handle);
}

std::int64_t at_least_one(std::int64_t size) { return size > 0 ? size : 1; }

}  // namespace

Tensor empty(const Tensor& like, std::span<const std::int64_t> shape, std::int32_t dtype) {
    std::int64_t strides[TensorView::kMaxRank];
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
        strides[d] = stride;
        stride *= at_least_one(shape[d]);
    }
    return empty_strided(like, shape, strides, dtype);
}

Tensor empty_heads_first(const Tensor& like, const std::array<std::int64_t, 4>& shape, std::int32_t dtype) {
    if (like.stride(1) >= like.stride(2)) return empty(like, shape, dtype);
    const std::int64_t row = at_least_one(shape[3]);
    const std::int64_t len = row * at_least_one(shape[1]);
    const std::int64_t strides[] = {len * at_least_one(shape[2]), row, len, 1};
    return empty_strided(like, shape, strides, dtype);
}

Tensor empty_like(const Tensor& like, bool heads_first) {
    const auto sizes = like.sizes();
    const std::int32_t dtype = torch_dtype_of(like);
    if (heads_first) return empty_heads_first(like, {sizes[0], sizes[1], sizes[2], sizes[3]}, dtype);
    return empty(like, std::span(sizes.data(), sizes.size()), dtype);
}

TorchWorkspace::TorchWorkspace(const Tensor& like, const Plan& plan) : bytes_(plan.workspace_bytes) {
    if (bytes_ == 0) return;
    memory_ = empty(like, {static_cast<std::int64_t>(bytes_)}, aoti_torch_dtype_uint8());
    data_ = static_cast<std::byte*>(memory_->data_ptr());
}

}  // namespace tessera::torch_ops
