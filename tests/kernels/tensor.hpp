// SPDX-License-Identifier: Apache-2.0
//
// A tensor that owns its memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/numeric.hpp"
#include "tessera/tessera.hpp"

namespace tessera::check {

/// A tensor that owns its memory, C order. `view` may be changed to look at the memory otherwise.
struct Tensor {
    std::vector<std::byte> memory;
    TensorView view{};

    Tensor() = default;
    Tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
        view = dense_view(nullptr, dtype, shape);
        memory.resize(static_cast<std::size_t>(view.size() * size_of(dtype)));
        view.data = memory.data();
    }
    Tensor(Tensor&&) = default;
    Tensor& operator=(Tensor&&) = default;
    Tensor(const Tensor& other) : memory(other.memory), view(other.view) { view.data = memory.data(); }
    Tensor& operator=(const Tensor& other) { return *this = Tensor(other); }

    /// Element by its indices, as fp64.
    double get(std::int64_t a, std::int64_t b = 0, std::int64_t c = 0, std::int64_t d = 0) const {
        return load_as_double(at(a, b, c, d), view.dtype);
    }
    void set(double value, std::int64_t a, std::int64_t b = 0, std::int64_t c = 0, std::int64_t d = 0) {
        store_from_double(at(a, b, c, d), view.dtype, value);
    }
    void fill_value(double value) {
        for_each_element(view,
                         [&](std::int64_t, std::byte* element) { store_from_double(element, view.dtype, value); });
    }
    void scale_by(double factor) {
        for_each_element(view, [&](std::int64_t, std::byte* element) {
            store_from_double(element, view.dtype, factor * load_as_double(element, view.dtype));
        });
    }
    void poison() { std::fill(memory.begin(), memory.end(), std::byte{0xFF}); }
    bool same_bits(const Tensor& other) const { return memory == other.memory; }

 private:
    std::byte* at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
        return static_cast<std::byte*>(view.data) + size_of(view.dtype) * (a * view.strides[0] + b * view.strides[1] +
                                                                           c * view.strides[2] + d * view.strides[3]);
    }
};

inline bool all_finite(const Tensor& t) {
    bool finite = true;
    for_each_element(t.view, [&](std::int64_t, const std::byte* e) {
        finite = finite && std::isfinite(load_as_double(e, t.view.dtype));
    });
    return finite;
}

}  // namespace tessera::check
