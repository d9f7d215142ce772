// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/checks.hpp"

namespace tessera {
namespace {

/// One dimension of a comparison of two indices: a step, and how far the difference of the indices can go.
struct Axis {
    std::int64_t stride;
    std::int64_t lowest;   // -(size of b - 1)
    std::int64_t highest;  // size of a - 1
};

std::int64_t lowest_byte(const TensorView& t) {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        if (t.shape[d] > 1 && t.strides[d] < 0) at += (t.shape[d] - 1) * t.strides[d];
    }
    return at * size_of(t.dtype);
}

std::int64_t extent_bytes(const TensorView& t) {
    std::int64_t extent = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        if (t.shape[d] > 1) extent += (t.shape[d] - 1) * std::abs(t.strides[d]);
    }
    return extent * size_of(t.dtype);
}

void sort_by_stride(std::vector<Axis>& axes) {
    std::sort(axes.begin(), axes.end(), [](const Axis& x, const Axis& y) { return x.stride > y.stride; });
}

/// The furthest that the axes from `axis` on can go together.
std::int64_t reach_from(const std::vector<Axis>& axes, std::size_t axis) {
    std::int64_t reach = 0;
    for (; axis < axes.size(); ++axis) reach += axes[axis].stride * std::max(axes[axis].highest, -axes[axis].lowest);
    return reach;
}

/// Is there a choice of one index difference per axis whose steps land within one element of `target` bytes?
/// Axes are sorted by falling stride, so at each axis only the differences next to target / stride can do; where the
/// inner axes reach further than one stride, all of them are tried.
bool reaches(const std::vector<Axis>& axes, std::size_t axis, std::int64_t target, std::int64_t element_bytes) {
    if (axis == axes.size()) return std::abs(target) < element_bytes;
    const std::int64_t reach = element_bytes - 1 + reach_from(axes, axis + 1);
    const Axis& here = axes[axis];
    if (here.stride == 0) return reaches(axes, axis + 1, target, element_bytes);
    // Division rounds towards zero: at most one step too many on either side, which the loop leaves out.
    const std::int64_t first = std::max(here.lowest, (target - reach) / here.stride);
    const std::int64_t last = std::min(here.highest, (target + reach) / here.stride);
    for (std::int64_t difference = first; difference <= last; ++difference) {
        if (std::abs(target - difference * here.stride) > reach) continue;
        if (reaches(axes, axis + 1, target - difference * here.stride, element_bytes)) return true;
    }
    return false;
}

}  // namespace

bool may_overlap(const TensorView& a, const TensorView& b) {
    if (!a.given() || !b.given() || a.size() == 0 || b.size() == 0) return false;
    const std::int64_t a_begin = reinterpret_cast<std::intptr_t>(a.data) + lowest_byte(a);
    const std::int64_t b_begin = reinterpret_cast<std::intptr_t>(b.data) + lowest_byte(b);
    if (a_begin + extent_bytes(a) <= b_begin || b_begin + extent_bytes(b) <= a_begin) return false;
    if (a.rank != b.rank || size_of(a.dtype) != size_of(b.dtype)) return true;
    std::vector<Axis> axes;
    for (std::size_t d = 0; d < static_cast<std::size_t>(a.rank); ++d) {
        if (a.shape[d] == 1 && b.shape[d] == 1) continue;
        const std::int64_t stride = a.shape[d] == 1 ? b.strides[d] : a.strides[d];
        if (b.shape[d] != 1 && b.strides[d] != stride) return true;
        const std::int64_t sign = stride < 0 ? -1 : 1;
        const std::int64_t highest = sign > 0 ? a.shape[d] - 1 : b.shape[d] - 1;
        const std::int64_t lowest = sign > 0 ? -(b.shape[d] - 1) : -(a.shape[d] - 1);
        axes.push_back({std::abs(stride) * size_of(a.dtype), lowest, highest});
    }
    sort_by_stride(axes);
    const std::int64_t distance = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
    return reaches(axes, 0, distance, size_of(a.dtype));
}

bool overlaps_itself(const TensorView& view) {
    if (view.size() <= 1) return false;
    std::vector<Axis> axes;  // strides in elements
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
        if (view.shape[d] > 1) axes.push_back({std::abs(view.strides[d]), 1 - view.shape[d], view.shape[d] - 1});
    }
    sort_by_stride(axes);
    // Two indices of one element differ first along some axis, there by 1 or more (exchange them if need be).
    for (std::size_t first = 0; first < axes.size(); ++first) {
        const Axis& here = axes[first];
        for (std::int64_t difference = 1; difference <= here.highest; ++difference) {
            const std::int64_t target = difference * here.stride;
            if (target > reach_from(axes, first + 1)) break;
            if (reaches(axes, first + 1, target, 1)) return true;
        }
    }
    return false;
}

}  // namespace tessera
