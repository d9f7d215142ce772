// SPDX-License-Identifier: Apache-2.0
#include "tessera/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "tessera/error.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max();

/// The rank as an array size, clamped when a caller set it wrongly: messages describe such views too.
std::size_t rank_of(const TensorView& view) {
    return static_cast<std::size_t>(std::clamp(view.rank, 0, TensorView::kMaxRank));
}

}  // namespace

std::int64_t TensorView::size() const {
    std::int64_t count = 1;
    for (const std::int64_t n : std::span(shape).first(rank_of(*this))) {
        if (n <= 0) return 0;
        // No division: every call of a kernel asks for some ten sizes.
        if (__builtin_mul_overflow(count, n, &count)) count = kMostElements;
    }
    return count;
}

std::string TensorView::describe() const {
    if (!given()) return "nothing";
    const std::size_t n = rank_of(*this);
    return fmt::format("{} [{}] strides [{}]", name_of(dtype), fmt::join(std::span(shape).first(n), ", "),
                       fmt::join(std::span(strides).first(n), ", "));
}

TensorView dense_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
    TensorView view = strided_view(data, dtype, shape, shape, device);
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
        view.strides[d] = stride;
        const std::int64_t n = std::max<std::int64_t>(view.shape[d], 1);
        if (stride > kMostElements / n) {
            throw Error(
                ErrorCode::invalid_argument, "shape",
                fmt::format("expected sizes that multiply to less than 2^63, got [{}]", fmt::join(shape, ", ")));
        }
        stride *= n;
    }
    return view;
}

TensorView strided_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides, Device device) {
    if (shape.size() > TensorView::kMaxRank || shape.size() == 0) {
        throw Error(ErrorCode::invalid_argument, "shape",
                    fmt::format("expected rank 1..{}, got {}", TensorView::kMaxRank, shape.size()));
    }
    if (shape.size() != strides.size()) {
        throw Error(ErrorCode::invalid_argument, "strides",
                    fmt::format("expected {} strides as for the shape, got {}", shape.size(), strides.size()));
    }
    TensorView view{
        .data = const_cast<void*>(data), .dtype = dtype, .rank = static_cast<int>(shape.size()), .device = device};
    std::copy(shape.begin(), shape.end(), view.shape.begin());
    std::copy(strides.begin(), strides.end(), view.strides.begin());
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 0; })) {
        throw Error(ErrorCode::invalid_argument, "shape", "expected sizes >= 0, got " + view.describe());
    }
    return view;
}

TensorView transposed(const TensorView& view, int a, int b) {
    if (a < 0 || b < 0 || a >= view.rank || b >= view.rank) {
        throw Error(ErrorCode::invalid_argument, "dimension",
                    fmt::format("expected two of 0..{}, got {} and {}", view.rank - 1, a, b));
    }
    TensorView result = view;
    std::swap(result.shape[static_cast<std::size_t>(a)], result.shape[static_cast<std::size_t>(b)]);
    std::swap(result.strides[static_cast<std::size_t>(a)], result.strides[static_cast<std::size_t>(b)]);
    return result;
}

}  // namespace tessera
