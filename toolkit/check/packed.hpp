// SPDX-License-Identifier: Apache-2.0
//
// fp64 copies of tensors of any dtype and strides. The gold is computed from them and stored in them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/tensor.hpp"

namespace tessera::check {

/// An fp64 tensor that owns its memory. It can be moved, which keeps the view valid, but not copied.
struct Packed {
    std::vector<double> data;
    TensorView view{};  ///< C order; dimensions that were expanded by stride 0 stay expanded

    Packed() = default;
    Packed(Packed&&) = default;
    Packed& operator=(Packed&&) = default;
};

/// Copies every element of `from`, converted exactly. An absent tensor stays absent.
Packed packed_copy(const TensorView& from);

/// Returns zeros in the shape of `like`, in C order.
Packed packed_zeros(const TensorView& like);

/// Returns the shape at rank 4, with size 1 for the dimensions that `t` lacks.
inline std::array<std::int64_t, 4> shape_of_rank_4(const TensorView& t) {
    std::array<std::int64_t, 4> shape{1, 1, 1, 1};
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) shape[d] = t.shape[d];
    return shape;
}

/// Calls f(flat, element) for every element of slices begin ... end - 1 in C order, with its C order index and its
/// address as std::byte*. A slice holds the elements under one pair of the first two indices.
template <class F>
void for_each_element_of_slices(const TensorView& t, std::int64_t begin, std::int64_t end, F&& f) {
    const auto shape = shape_of_rank_4(t);
    const auto stride = [&](std::size_t d) { return t.strides[d] * size_of(t.dtype); };
    std::int64_t flat = begin * shape[2] * shape[3];
    for (std::int64_t slice = begin; slice < end; ++slice) {
        for (std::int64_t c = 0; c < shape[2]; ++c) {
            auto* row = static_cast<std::byte*>(t.data) + slice / shape[1] * stride(0) + slice % shape[1] * stride(1) +
                        c * stride(2);
            for (std::int64_t d = 0; d < shape[3]; ++d) f(flat++, row + d * stride(3));
        }
    }
}

/// Calls f(flat, element) for every element.
template <class F>
void for_each_element(const TensorView& t, F&& f) {
    if (!t.given() || t.size() == 0) return;
    const auto shape = shape_of_rank_4(t);
    for_each_element_of_slices(t, 0, shape[0] * shape[1], f);
}

/// Copies fp64 values into a tensor of any dtype, rounding once.
void store_all(const TensorView& from, const TensorView& to);

/// The residuals of rounding fp64 values to `dtype`.
void store_residuals(const TensorView& from, const TensorView& to, DType dtype);

/// Returns the indices of the element with C order index `flat`, such as "[1, 0, 3]".
std::string index_text(const TensorView& t, std::int64_t flat);

}  // namespace tessera::check
