// SPDX-License-Identifier: Apache-2.0
//
// Tensors for the tests: they own their memory, and every element can be read and written as fp64 whatever its dtype,
// shape and strides.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "core/numeric.hpp"
#include "tessera/tessera.hpp"

namespace tessera::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Index = std::array<std::int64_t, TensorView::kMaxRank>;

/// A view and the memory that it looks at. Copies are deep.
class Tensor {
 public:
    Tensor() = default;

    /// A packed tensor in C order, all zero.
    Tensor(DType dtype, std::initializer_list<std::int64_t> shape) : view_(dense_view(nullptr, dtype, shape)) {
        allocate(static_cast<std::size_t>(view_.size()));
    }

    /// Shape and strides of `like`, in memory of `elements` elements of which number `first` is element (0, ..., 0).
    Tensor(const TensorView& like, std::size_t elements, std::int64_t first) : view_(like), first_(first) {
        allocate(elements);
    }

    Tensor(const Tensor& other) { *this = other; }
    Tensor& operator=(const Tensor& other) {
        bytes_ = other.bytes_;
        view_ = other.view_;
        first_ = other.first_;
        if (view_.given()) point();
        return *this;
    }

    const TensorView& view() const { return view_; }
    operator const TensorView&() const { return view_; }
    std::vector<std::byte>& bytes() { return bytes_; }
    const std::vector<std::byte>& bytes() const { return bytes_; }

    double at(const Index& i) const { return load_as_double(address(i), view_.dtype); }
    double at(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) const {
        return at(Index{i0, i1, i2, i3});
    }
    void set(double value, const Index& i) { store_from_double(address(i), view_.dtype, value); }
    void set(double value, std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) {
        set(value, Index{i0, i1, i2, i3});
    }

 private:
    void allocate(std::size_t elements) {
        bytes_.resize(elements * static_cast<std::size_t>(size_of(view_.dtype)));
        point();
    }
    void point() { view_.data = bytes_.empty() ? nullptr : bytes_.data() + first_ * size_of(view_.dtype); }
    void* address(const Index& i) const {
        std::int64_t offset = 0;
        for (std::size_t d = 0; d < i.size(); ++d) offset += i[d] * view_.strides[d];
        return static_cast<std::byte*>(view_.data) + offset * size_of(view_.dtype);
    }

    std::vector<std::byte> bytes_;
    TensorView view_;
    std::int64_t first_ = 0;
};

/// Calls f for every index of the view, the last dimension fastest.
inline void for_each_index(const TensorView& view, const std::function<void(const Index&)>& f) {
    Index n{1, 1, 1, 1};
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) n[d] = view.shape[d];
    Index i{};
    for (i[0] = 0; i[0] < n[0]; ++i[0]) {
        for (i[1] = 0; i[1] < n[1]; ++i[1]) {
            for (i[2] = 0; i[2] < n[2]; ++i[2]) {
                for (i[3] = 0; i[3] < n[3]; ++i[3]) f(i);
            }
        }
    }
}

/// All elements in C order, as fp64.
inline std::vector<double> values(const Tensor& tensor) {
    std::vector<double> result;
    if (tensor.view().given()) for_each_index(tensor, [&](const Index& i) { result.push_back(tensor.at(i)); });
    return result;
}

/// The bits of all elements in C order: equal exactly when no bit differs, NaN included.
inline std::vector<std::uint64_t> bits(const Tensor& tensor) {
    std::vector<std::uint64_t> result;
    for (const double value : values(tensor)) result.push_back(std::bit_cast<std::uint64_t>(value));
    return result;
}

inline void fill(Tensor& tensor, double value) {
    if (tensor.view().given()) for_each_index(tensor, [&](const Index& i) { tensor.set(value, i); });
}

inline void fill_normal(Tensor& tensor, std::mt19937_64& random, double deviation = 1) {
    std::normal_distribution<double> normal(0, deviation);
    for_each_index(tensor, [&](const Index& i) { tensor.set(normal(random), i); });
}

/// The layout of a tensor: `order` lists its dimensions from the outermost in memory inwards, dimension d is reversed
/// if `reversed[d]`, and `gap` elements are left free after each.
struct Layout {
    std::vector<int> order;
    std::vector<bool> reversed;
    int gap = 0;
};

/// A copy of the tensor with this layout; the free elements between its elements are NaN.
inline Tensor laid_out(const Tensor& tensor, const Layout& layout) {
    TensorView view = tensor.view();
    std::int64_t stride = 1 + layout.gap;
    std::int64_t first = 0;
    for (std::size_t place = layout.order.size(); place-- > 0;) {
        const auto d = static_cast<std::size_t>(layout.order[place]);
        const std::int64_t steps = view.shape[d] > 0 ? view.shape[d] - 1 : 0;
        view.strides[d] = layout.reversed[d] ? -stride : stride;
        if (layout.reversed[d]) first += steps * stride;
        stride *= steps + 1;
    }
    const auto elements = view.size() == 0 ? std::size_t{0} : static_cast<std::size_t>(stride);
    Tensor result(view, elements, first);
    for (std::size_t e = 0; e < elements; ++e) {
        store_from_double(result.bytes().data() + e * static_cast<std::size_t>(size_of(view.dtype)), view.dtype, kNan);
    }
    for_each_index(view, [&](const Index& i) { result.set(tensor.at(i), i); });
    return result;
}

/// The tensor's memory with stride 0 along dimension d: its first element stands for all.
inline Tensor expanded(const Tensor& tensor, std::size_t d) {
    TensorView view = tensor.view();
    view.strides[d] = 0;
    Tensor result(view, tensor.bytes().size() / static_cast<std::size_t>(size_of(view.dtype)), 0);
    std::copy(tensor.bytes().begin(), tensor.bytes().end(), result.bytes().begin());
    return result;
}

}  // namespace tessera::test
