// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "tessera/dtype.hpp"

#pragma GCC visibility push(default)
namespace tessera {

enum class DeviceType : std::uint8_t { cpu, cuda };

/// The device whose memory holds a tensor.
struct Device {
    DeviceType type = DeviceType::cpu;
    int index = 0;
    friend bool operator==(const Device&, const Device&) = default;
};

/// A borrowed, strided array: it owns nothing and is cheap to copy. Inputs are never written through `data`.
/// Strides are in elements, may be 0 (expanded inputs) or negative, and are arbitrary per tensor.
struct TensorView {
    static constexpr int kMaxRank = 4;

    void* data = nullptr;  ///< address of element (0, ..., 0); may be null only when size() == 0
    DType dtype = DType::fp32;
    int rank = 0;  ///< 0: an optional tensor that was not given (a default-constructed view)
    std::array<std::int64_t, kMaxRank> shape{};
    std::array<std::int64_t, kMaxRank> strides{};
    Device device{};

    /// Was the tensor given? If not, no other field is read.
    bool given() const { return rank > 0; }

    /// Number of elements: the product of the shape. Stays at the largest int64 instead of wrapping.
    std::int64_t size() const;

    /// Address of the element at the given indices; no bounds are checked.
    template <class T>
    T* at(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) const {
        return static_cast<T*>(data) + i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + i3 * strides[3];
    }

    /// "fp32 [2, 128, 8, 64] strides [65536, 512, 64, 1]", for messages.
    std::string describe() const;
};

/// A view of packed memory in C order (the last dimension has stride 1).
/// Throws Error(invalid_argument) when the rank is 0 or over TensorView::kMaxRank, a size is negative, or there are
/// more elements than int64 can count.
TensorView dense_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

/// A view with the given strides in elements; `shape` and `strides` have the same length.
TensorView strided_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides, Device device = {});

/// A view of the same memory with dimensions `a` and `b` exchanged: a [batch, heads, len, head_dim] tensor becomes the
/// canonical [batch, len, heads, head_dim] by `transposed(view, 1, 2)`, without a copy.
TensorView transposed(const TensorView& view, int a, int b);

}  // namespace tessera
#pragma GCC visibility pop
