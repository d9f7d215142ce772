// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/tensor.hpp"

namespace tessera {

/// Bytes from element (0, ..., 0) to the elements of the lowest and of the highest address.
struct Reach {
    std::int64_t lowest = 0;
    std::int64_t highest = 0;
};

/// The reach of a view that has elements.
inline Reach reach_of(const TensorView& view) {
    Reach reach;
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
        const std::int64_t last = (view.shape[d] - 1) * view.strides[d] * size_of(view.dtype);
        (last < 0 ? reach.lowest : reach.highest) += last;
    }
    return reach;
}

/// The bytes between the lowest and the highest element of a view; nothing when it has no elements.
inline std::span<std::byte> extent(const TensorView& view) {
    if (!view.given() || view.size() == 0) return {};
    const Reach reach = reach_of(view);
    auto* begin = static_cast<std::byte*>(view.data) + reach.lowest;
    return {begin, static_cast<std::size_t>(reach.highest - reach.lowest + size_of(view.dtype))};
}

}  // namespace tessera
