// SPDX-License-Identifier: Apache-2.0
#include "tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check/packed.hpp"
#include "core/numeric.hpp"
#include "io/memory.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// The view with a leading dimension of size 1.
TensorView with_batch_of_one(const TensorView& t) {
    TensorView result = t;
    result.rank = t.rank + 1;
    for (auto d = static_cast<std::size_t>(t.rank); d > 0; --d) {
        result.shape[d] = t.shape[d - 1];
        result.strides[d] = t.strides[d - 1];
    }
    result.shape[0] = 1;
    result.strides[0] = t.size();
    return result;
}

}  // namespace

void expect_workspace(const Plan& plan) {
    if (plan.device.type == DeviceType::cpu)
        io::expect_memory(plan.workspace_bytes, fmt::format("the workspace of {}", plan.kernel->name));
}

OwnedTensor make_tensor(const std::string& name, DType dtype, std::span<const std::int64_t> shape) {
    OwnedTensor result;
    result.view.dtype = dtype;
    result.view.rank = static_cast<int>(shape.size());
    constexpr std::int64_t kMostElements = std::int64_t{1} << 59;  // bounds the size in bytes
    std::int64_t elements = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
        result.view.shape[d] = shape[d];
        result.view.strides[d] = elements;
        if (__builtin_mul_overflow(elements, shape[d], &elements) || elements > kMostElements) {
            throw Error(ErrorCode::out_of_memory, name, "expected at most 2^59 elements, got more");
        }
    }
    const auto bytes = static_cast<std::uint64_t>(elements) * static_cast<std::uint64_t>(size_of(dtype));
    result.data = io::allocate(bytes, name);
    std::memset(result.data.get(), 0, bytes);
    result.view.data = result.data.get();
    return result;
}

OwnedTensor converted(const std::string& name, const TensorView& from, DType dtype) {
    OwnedTensor result = make_tensor(name, dtype, std::span(from.shape).first(static_cast<std::size_t>(from.rank)));
    check::for_each_element(from, [&](std::int64_t flat, const std::byte* element) {
        store_from_double(result.data.get() + flat * size_of(dtype), dtype, load_as_double(element, from.dtype));
    });
    return result;
}

TensorView FileLayout::canonical(const TensorView& in_file) const {
    const TensorView t = unbatched && in_file.rank == 3 ? with_batch_of_one(in_file) : in_file;
    if (layout == Layout::bshd || t.rank < 3) return t;
    return transposed(t, t.rank - 3, t.rank - 2);
}

std::vector<std::int64_t> FileLayout::in_file(std::span<const std::int64_t> canonical) const {
    std::vector<std::int64_t> shape(canonical.begin(), canonical.end());
    if (unbatched && shape.size() == 4) shape.erase(shape.begin());
    if (layout == Layout::bhsd) std::swap(shape[shape.size() - 3], shape[shape.size() - 2]);
    return shape;
}

TensorView FileLayout::canonical_lse(const TensorView& in_file) const {
    return unbatched && in_file.rank == 2 ? with_batch_of_one(in_file) : in_file;
}

std::int64_t count_nan(const TensorView& tensor) {
    std::int64_t count = 0;
    check::for_each_element(tensor, [&](std::int64_t, const std::byte* element) {
        if (std::isnan(load_as_double(element, tensor.dtype))) ++count;
    });
    return count;
}

std::vector<std::int64_t> FileLayout::lse_in_file(const Problem& problem) const {
    if (ragged) return {problem.heads_q, problem.total_q};
    if (unbatched) return {problem.heads_q, problem.len_q};
    return {problem.batch, problem.heads_q, problem.len_q};
}

}  // namespace tessera::cli
