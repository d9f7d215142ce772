// SPDX-License-Identifier: Apache-2.0
//
// Tensors of PyTorch's stable ABI as tensors of tessera, and new ones from PyTorch's allocator.
#pragma once

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

[[noreturn]] inline void invalid(const char* argument, const std::string& message) {
    throw Error(ErrorCode::invalid_argument, argument, message);
}

/// The dtype that tessera has for it; throws Error(invalid_argument) naming `argument` when there is none.
DType dtype_of(const char* argument, const Tensor& tensor);

/// The same memory as a view. Throws Error(invalid_argument) for dtypes and ranks that tessera doesn't have.
TensorView view_of(const char* argument, const Tensor& tensor);

/// The same of a tensor that may be left out: a view of rank 0 stands for none.
TensorView view_of(const char* argument, const OptionalTensor& tensor);

/// The same of q, k, v, o or a gradient: [batch, len, heads, dim] or ragged [total, heads, dim], as tessera has them,
/// of a dense tensor that has its heads first.
TensorView rows_of(const char* argument, const Tensor& tensor, bool heads_first);

/// A new contiguous tensor on the device of `like`; `dtype` is one of PyTorch's numbers (aoti_torch_dtype_float32()).
Tensor empty(const Tensor& like, std::span<const std::int64_t> shape, std::int32_t dtype);
inline Tensor empty(const Tensor& like, std::initializer_list<std::int64_t> shape, std::int32_t dtype) {
    return empty(like, std::span(shape.begin(), shape.size()), dtype);
}

/// A new tensor [batch, heads, len, dim] that lies in memory as `like` does, with its heads or its rows outermost.
Tensor empty_heads_first(const Tensor& like, const std::array<std::int64_t, 4>& shape, std::int32_t dtype);

/// PyTorch's number of the tensor's dtype.
std::int32_t torch_dtype_of(const Tensor& tensor);

/// A new tensor of the shape and dtype of `like`: contiguous, or as empty_heads_first() has it.
Tensor empty_like(const Tensor& like, bool heads_first = false);

/// The workspace of a plan, from the allocator of the device that `like` lies on. Lives as long as the object: on CUDA
/// PyTorch gives the memory to later work of the same stream only, so it may go while the kernel still runs.
class TorchWorkspace {
 public:
    TorchWorkspace(const Tensor& like, const Plan& plan);
    std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
    std::optional<Tensor> memory_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace tessera::torch_ops
