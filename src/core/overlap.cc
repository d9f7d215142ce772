// SPDX-License-Identifier: Apache-2.0
//
// Do two views share memory? Their elements lie at sums of multiples of strides, so the question is whether some
//     stride[0] * x[0] + stride[1] * x[1] + ...,  0 <= x[n] <= steps[n],
// falls into an interval. One and two axes are answered in closed form; more axes branch over the longest stride, and a
// search that takes too long counts as "they may".
#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <span>

#include "core/checks.hpp"
#include "core/extent.hpp"

namespace tessera {
namespace {

struct Axis {
    std::int64_t stride;  // > 0
    std::int64_t steps;   // > 0
};

/// Both ends belong to it.
struct Interval {
    std::int64_t first;
    std::int64_t last;
    Interval operator-(std::int64_t offset) const { return {first - offset, last - offset}; }
};

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return -floor_div(-a, b); }

/// Sum of (a t + b) / m, rounded down, over t in [0, n), modulo 2^64 (Concrete Mathematics, section 3.5: a and m change
/// places as in Euclid's algorithm).
std::uint64_t floor_sum(std::uint64_t n, std::uint64_t m, std::uint64_t a, std::uint64_t b) {
    std::uint64_t sum = 0;
    while (true) {
        sum += (n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n) * (a / m) + n * (b / m);
        a %= m;
        b %= m;
        const std::uint64_t last = a * n + b;
        if (last < m) return sum;
        n = last / m;
        b = last % m;
        std::swap(m, a);
    }
}

/// Is one of large.stride * x + small.stride * y in `wanted`? wanted is shorter than either stride, so that a value of
/// x leaves one y at most.
bool two_axes_reach(const Axis& large, const Axis& small, const Interval& wanted) {
    // The range of x for which y is neither below 0 nor over its steps.
    const std::int64_t first =
        std::max<std::int64_t>(0, ceil_div(wanted.first - small.stride * small.steps, large.stride));
    const std::int64_t last = std::min(large.steps, floor_div(wanted.last, large.stride));
    if (first > last) return false;
    // For such x, a y exists if (wanted.last - large.stride * x) mod small.stride is at most the interval's length.
    // Count the x of which it holds, from the last one down.
    const auto n = static_cast<std::uint64_t>(last - first + 1);
    const auto m = static_cast<std::uint64_t>(small.stride);
    const auto a = static_cast<std::uint64_t>(large.stride);
    const auto b = static_cast<std::uint64_t>(wanted.last - large.stride * last);
    const auto length = static_cast<std::uint64_t>(wanted.last - wanted.first);
    return n + floor_sum(n, m, a, b) != floor_sum(n, m, a, b + m - length - 1);
}

class Axes {
 public:
    void add(std::int64_t stride, std::int64_t steps) {
        stride = std::abs(stride);
        if (stride == 0 || steps == 0) return;
        const auto same =
            std::find_if(axes_.begin(), axes_.begin() + size_, [&](const Axis& a) { return a.stride == stride; });
        if (same != axes_.begin() + size_) same->steps += steps;
        else axes_[static_cast<std::size_t>(size_++)] = {stride, steps};
    }

    /// Does a sum fall into `wanted`? True too when that could not be settled.
    bool reach(Interval wanted) {
        const auto end = axes_.begin() + size_;
        std::sort(axes_.begin(), end, [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
        // An axis whose step is at most the length of the interval extends the interval without gaps.
        for (; size_ > 0; --size_) {
            const Axis& least = axes_[static_cast<std::size_t>(size_ - 1)];
            if (least.stride > wanted.last - wanted.first + 1) break;
            wanted.first -= least.stride * least.steps;
        }
        return reach_from(0, wanted);
    }

 private:
    /// Branches of a search. Views seldom need more than ten.
    static constexpr int kBudget = 256;

    bool reach_from(std::ptrdiff_t axis, const Interval& wanted) {
        const std::span<const Axis> rest(axes_.begin() + axis, axes_.begin() + size_);
        std::int64_t furthest = 0;
        std::int64_t divisor = 0;
        for (const Axis& a : rest) furthest += a.stride * a.steps, divisor = std::gcd(divisor, a.stride);
        if (wanted.last < 0 || wanted.first > furthest) return false;
        if (wanted.first <= 0 || wanted.last >= furthest) return true;
        if (wanted.last - wanted.last % divisor < wanted.first) return false;
        if (rest.size() == 1) return true;
        if (++branches_ > kBudget) return true;
        if (rest.size() == 2) return two_axes_reach(rest[0], rest[1], wanted);
        const Axis& here = rest[0];
        const std::int64_t inner = furthest - here.stride * here.steps;
        const std::int64_t first = std::max<std::int64_t>(0, ceil_div(wanted.first - inner, here.stride));
        const std::int64_t last = std::min(here.steps, floor_div(wanted.last, here.stride));
        for (std::int64_t x = first; x <= last; ++x) {
            if (reach_from(axis + 1, wanted - x * here.stride)) return true;
        }
        return false;
    }

    std::array<Axis, 2 * TensorView::kMaxRank> axes_{};
    int size_ = 0;
    int branches_ = 0;
};

void add_axes(Axes& axes, const TensorView& t) {
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        axes.add(t.strides[d] * size_of(t.dtype), t.shape[d] - 1);
    }
}

/// Is each stride larger than all axes of smaller strides reach together? Then no two indices name one element. This
/// holds for every tensor that was allocated as one, in any order of its axes.
bool is_nested(const TensorView& t) {
    std::array<Axis, TensorView::kMaxRank> axes{};
    std::size_t size = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        if (t.shape[d] <= 1) continue;
        std::size_t slot = size++;
        const Axis axis{std::abs(t.strides[d]), t.shape[d] - 1};
        for (; slot > 0 && axes[slot - 1].stride > axis.stride; --slot) axes[slot] = axes[slot - 1];
        axes[slot] = axis;
    }
    std::int64_t reached = 0;
    for (const Axis& axis : std::span(axes).first(size)) {
        if (axis.stride <= reached) return false;
        reached += axis.stride * axis.steps;
    }
    return true;
}

}  // namespace

bool may_overlap(const TensorView& a, const TensorView& b) {
    if (!a.given() || !b.given() || a.size() == 0 || b.size() == 0) return false;
    const Reach reach_a = reach_of(a);
    const Reach reach_b = reach_of(b);
    const std::int64_t distance = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
    // Two elements share a byte if a begins less than a's size before b, or less than b's size after b.
    const Interval meeting{distance - size_of(a.dtype) + 1, distance + size_of(b.dtype) - 1};
    const std::int64_t lowest = reach_a.lowest - reach_b.highest;
    if (meeting.last < lowest || meeting.first > reach_a.highest - reach_b.lowest) return false;
    Axes axes;
    add_axes(axes, a);
    add_axes(axes, b);
    return axes.reach(meeting - lowest);
}

bool may_touch(const TensorView& view, std::span<const std::byte> memory) {
    if (!view.given() || view.size() == 0 || memory.empty()) return false;
    const Reach reach = reach_of(view);
    const std::int64_t begin =
        reinterpret_cast<std::intptr_t>(memory.data()) - reinterpret_cast<std::intptr_t>(view.data);
    const Interval meeting{begin - size_of(view.dtype) + 1, begin + static_cast<std::int64_t>(memory.size()) - 1};
    if (meeting.last < reach.lowest || meeting.first > reach.highest) return false;
    Axes axes;
    add_axes(axes, view);
    return axes.reach(meeting - reach.lowest);
}

bool overlaps_itself(const TensorView& view) {
    if (view.size() <= 1 || is_nested(view)) return false;
    // Two indices of one element differ first along some axis, there by 1 or more (exchange them if need be).
    for (std::size_t first = 0; first < static_cast<std::size_t>(view.rank); ++first) {
        if (view.shape[first] == 1) continue;
        const std::int64_t stride = std::abs(view.strides[first]);
        Axes axes;
        axes.add(stride, view.shape[first] - 2);
        std::int64_t lowest = stride;
        for (std::size_t d = first + 1; d < static_cast<std::size_t>(view.rank); ++d) {
            axes.add(view.strides[d], 2 * (view.shape[d] - 1));
            lowest -= std::abs(view.strides[d]) * (view.shape[d] - 1);
        }
        if (axes.reach(Interval{0, 0} - lowest)) return true;
    }
    return false;
}

}  // namespace tessera
