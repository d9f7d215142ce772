// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/tensor.hpp"

namespace tessera {

/// The bytes between the lowest and the highest element of a view; nothing when it has no elements.
inline std::span<std::byte> extent(const TensorView& view) {
    if (!view.given() || view.size() == 0) return {};
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
        const std::int64_t reach = (view.shape[d] - 1) * view.strides[d];
        low += std::min<std::int64_t>(reach, 0);
        high += std::max<std::int64_t>(reach, 0);
    }
    auto* begin = static_cast<std::byte*>(view.data) + low * size_of(view.dtype);
    return {begin, static_cast<std::size_t>((high - low + 1) * size_of(view.dtype))};
}

}  // namespace tessera
