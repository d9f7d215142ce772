// SPDX-License-Identifier: Apache-2.0
//
// Views of PyTorch's tensors for libtessera, and new tensors from PyTorch's allocator, through the stable ABI.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::torch_ops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// A tensor that the caller keeps alive, or none. It copies no shared pointer, as a Tensor would.
class TensorRef {
 public:
    TensorRef() = default;
    TensorRef(const Tensor& tensor) : handle_(tensor.get()) {}
    TensorRef(const OptionalTensor& tensor) : handle_(tensor.has_value() ? tensor->get() : nullptr) {}
    explicit TensorRef(AtenTensorHandle handle) : handle_(handle) {}

    bool has_value() const { return handle_ != nullptr; }
    AtenTensorHandle get() const { return handle_; }
    std::int64_t dim() const;
    std::int64_t numel() const;
    std::int64_t size(std::int64_t dim) const { return sizes()[dim]; }
    std::int64_t stride(std::int64_t dim) const { return strides()[dim]; }
    const std::int64_t* sizes() const;    // [dim()]
    const std::int64_t* strides() const;  // [dim()]
    void* data_ptr() const;
    std::int32_t dtype() const;  ///< PyTorch's number: aoti_torch_dtype_float32(), ..
    std::int32_t device_type() const;
    std::int32_t device_index() const;
    bool is_cuda() const;

 private:
    AtenTensorHandle handle_ = nullptr;
};

[[noreturn]] inline void invalid(const char* argument, const std::string& message) {
    throw Error(ErrorCode::invalid_argument, argument, message);
}

/// The tensor's dtype. Throws Error(invalid_argument) naming `argument` when tessera has no such dtype.
DType dtype_of(const char* argument, TensorRef tensor);

/// A view of the tensor's memory, of rank 0 for no tensor. Throws Error(invalid_argument) for a dtype or rank that
/// tessera does not have.
TensorView view_of(const char* argument, TensorRef tensor);

/// view_of() of q, k, v, o or a gradient, in tessera's order: [batch, len, heads, dim] or ragged [total, heads, dim].
/// With heads_first a dense tensor is [batch, heads, len, dim].
TensorView rows_of(const char* argument, TensorRef tensor, bool heads_first);

/// A new contiguous tensor on the device of `like`; `dtype` is one of PyTorch's numbers (aoti_torch_dtype_float32()).
Tensor empty(TensorRef like, std::span<const std::int64_t> shape, std::int32_t dtype);
inline Tensor empty(TensorRef like, std::initializer_list<std::int64_t> shape, std::int32_t dtype) {
    return empty(like, std::span(shape.begin(), shape.size()), dtype);
}

/// A new tensor [batch, heads, len, dim] whose dimensions have the order of `like` in memory: heads or len outermost.
Tensor empty_heads_first(TensorRef like, const std::array<std::int64_t, 4>& shape, std::int32_t dtype);

/// A new tensor of the shape and dtype of `like`: contiguous, or with heads_first by empty_heads_first().
Tensor empty_like(TensorRef like, bool heads_first = false);

/// A copy of q, k, v or a gradient whose rows are contiguous and aligned to 16 bytes, if head_dim allows it.
Tensor aligned_copy(TensorRef tensor, bool heads_first);

/// The workspace of a plan, from PyTorch's allocator for the device of `like`, freed with the object. On CUDA that may
/// be while the kernel still runs: the allocator reuses the memory for later work on the same stream only.
class TorchWorkspace {
 public:
    TorchWorkspace(TensorRef like, const Plan& plan);
    std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
    std::optional<Tensor> memory_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace tessera::torch_ops
