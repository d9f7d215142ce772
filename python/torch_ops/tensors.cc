// SPDX-License-Identifier: Apache-2.0
#include "tensors.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace tessera::torch_ops {

namespace {

/// Calls a getter of PyTorch's C shim.
template <class Value, class Function>
Value asked(Function function, AtenTensorHandle tensor) {
    Value value{};
    STABLE_TORCH_ERROR_CODE_CHECK(function(tensor, &value));
    return value;
}

}  // namespace

std::int64_t TensorRef::dim() const { return asked<std::int64_t>(aoti_torch_get_dim, handle_); }
std::int64_t TensorRef::numel() const { return asked<std::int64_t>(aoti_torch_get_numel, handle_); }
const std::int64_t* TensorRef::sizes() const { return asked<std::int64_t*>(aoti_torch_get_sizes, handle_); }
const std::int64_t* TensorRef::strides() const { return asked<std::int64_t*>(aoti_torch_get_strides, handle_); }
void* TensorRef::data_ptr() const { return asked<void*>(aoti_torch_get_data_ptr, handle_); }
std::int32_t TensorRef::dtype() const { return asked<std::int32_t>(aoti_torch_get_dtype, handle_); }
std::int32_t TensorRef::device_type() const { return asked<std::int32_t>(aoti_torch_get_device_type, handle_); }
std::int32_t TensorRef::device_index() const { return asked<std::int32_t>(aoti_torch_get_device_index, handle_); }
bool TensorRef::is_cuda() const { return device_type() == aoti_torch_device_type_cuda(); }

DType dtype_of(const char* argument, TensorRef tensor) {
    using torch::headeronly::ScalarType;
    using torch::headeronly::toString;
    const auto type = static_cast<ScalarType>(tensor.dtype());
    switch (type) {
        case ScalarType::Float: return DType::fp32;
        case ScalarType::BFloat16: return DType::bf16;
        case ScalarType::Half: return DType::fp16;
        case ScalarType::Double: return DType::fp64;
        case ScalarType::Int: return DType::int32;
        case ScalarType::Long: return DType::int64;
        case ScalarType::Char: return DType::int8;
        default: break;
    }
    const std::string_view name = argument;
    const bool lengths = name.starts_with("cu_seqlens");
    const char* expected = lengths          ? "int32 or int64"
                           : name == "seed" ? "int64"
                                            : "float32, bfloat16, float16 or float64";
    invalid(argument, std::string("expected dtype ") + expected + ", got " + toString(type));
}

namespace {

/// The device that PyTorch states. libtessera does not verify it (Execution::skip_memory_check).
Device device_of(const char* argument, TensorRef tensor) {
    const std::int32_t type = tensor.device_type();
    if (type == aoti_torch_device_type_cpu()) return {};
    if (type == aoti_torch_device_type_cuda()) return {DeviceType::cuda, tensor.device_index()};
    invalid(argument, "expected a tensor on the CPU or a CUDA device, got one on another device");
}

}  // namespace

TensorView view_of(const char* argument, TensorRef tensor) {
    if (!tensor.has_value()) return {};
    const std::int64_t rank = tensor.dim();
    if (rank < 1 || rank > TensorView::kMaxRank) {
        invalid(argument,
                "expected 1.." + std::to_string(TensorView::kMaxRank) + " dimensions, got " + std::to_string(rank));
    }
    TensorView view{.data = tensor.data_ptr(),
                    .dtype = dtype_of(argument, tensor),
                    .rank = static_cast<int>(rank),
                    .device = device_of(argument, tensor)};
    std::copy_n(tensor.sizes(), rank, &view.shape[0]);
    std::copy_n(tensor.strides(), rank, &view.strides[0]);
    return view;
}

TensorView rows_of(const char* argument, TensorRef tensor, bool heads_first) {
    TensorView view = view_of(argument, tensor);
    if (heads_first && view.rank == 4) {
        std::swap(view.shape[1], view.shape[2]);
        std::swap(view.strides[1], view.strides[2]);
    }
    return view;
}

namespace {

Tensor empty_strided(TensorRef like, std::span<const std::int64_t> shape, const std::int64_t* strides,
                     std::int32_t dtype) {
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(),
                                                           strides, dtype, like.device_type(), like.device_index(),
                                                           &handle));
    return Tensor(handle);
}

std::int64_t at_least_one(std::int64_t size) { return size > 0 ? size : 1; }

}  // namespace

Tensor empty(TensorRef like, std::span<const std::int64_t> shape, std::int32_t dtype) {
    std::int64_t strides[TensorView::kMaxRank];
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
        strides[d] = stride;
        stride *= at_least_one(shape[d]);
    }
    return empty_strided(like, shape, strides, dtype);
}

Tensor empty_heads_first(TensorRef like, const std::array<std::int64_t, 4>& shape, std::int32_t dtype) {
    if (like.stride(1) >= like.stride(2)) return empty(like, shape, dtype);
    const std::int64_t row = at_least_one(shape[3]);
    const std::int64_t len = row * at_least_one(shape[1]);
    const std::int64_t strides[] = {len * at_least_one(shape[2]), row, len, 1};
    return empty_strided(like, shape, strides, dtype);
}

Tensor empty_like(TensorRef like, bool heads_first) {
    const std::int64_t* sizes = like.sizes();
    if (heads_first) return empty_heads_first(like, {sizes[0], sizes[1], sizes[2], sizes[3]}, like.dtype());
    return empty(like, std::span(sizes, static_cast<std::size_t>(like.dim())), like.dtype());
}

Tensor aligned_copy(TensorRef tensor, bool heads_first) {
    Tensor copy = empty_like(tensor, heads_first);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), /*non_blocking=*/0));
    return copy;
}

TorchWorkspace::TorchWorkspace(TensorRef like, const Plan& plan) : bytes_(plan.workspace_bytes) {
    if (bytes_ == 0) return;
    memory_ = empty(like, {static_cast<std::int64_t>(bytes_)}, aoti_torch_dtype_uint8());
    data_ = static_cast<std::byte*>(memory_->data_ptr());
}

}  // namespace tessera::torch_ops
