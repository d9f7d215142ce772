// SPDX-License-Identifier: Apache-2.0
#include "check/guarded.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "check/packed.hpp"
#include "tessera/plan.hpp"

namespace tessera::check {
namespace {

constexpr std::size_t kBand = 256;  // bytes of a guard band; wider than any vector register
constexpr std::byte kPoison{0xFF};

/// Order of the dimensions from outermost to innermost, and the gaps between them.
struct Arrangement {
    std::array<std::size_t, 4> order{0, 1, 2, 3};
    std::array<std::int64_t, 4> gap{};  // elements after the extent of a dimension
    std::array<bool, 4> reversed{};
    std::int64_t shift = 0;  // elements by which the start is misaligned
};

Arrangement random_arrangement(std::size_t rank, std::uint64_t seed) {
    const Random random(seed, 0xA11);
    Arrangement a;
    // The last dimension stays innermost in three of four tensors, which is the usual layout of callers.
    const std::size_t movable = random.uniform(0) < 0.75 ? rank - 1 : rank;
    for (std::size_t i = movable; i > 1; --i) std::swap(a.order[i - 1], a.order[random.bits(i) % i]);
    for (std::size_t d = 0; d < rank; ++d) {
        if (random.uniform(10 + d) < 0.5) a.gap[d] = static_cast<std::int64_t>(random.bits(20 + d) % 9);
        a.reversed[d] = random.uniform(30 + d) < 0.08;
    }
    if (movable < rank) a.reversed[rank - 1] = false;
    a.shift = static_cast<std::int64_t>(random.bits(40) % 16);
    return a;
}

Arrangement arrangement_of(Layout layout, std::size_t rank, std::uint64_t seed) {
    if (layout == Layout::random) return random_arrangement(rank, seed);
    Arrangement a;
    if (layout == Layout::bhsd && rank == 4) a.order = {0, 2, 1, 3};
    if (layout == Layout::bhsd && rank == 3) a.order = {1, 0, 2, 3};
    return a;
}

}  // namespace

GuardedTensor::GuardedTensor(DType dtype, std::initializer_list<std::int64_t> shape, Layout layout,
                             std::uint64_t layout_seed, bool expand) {
    view_ = dense_view(nullptr, dtype, shape);
    const auto rank = shape.size();
    const Arrangement a = arrangement_of(layout, rank, layout_seed);
    // Expanding the last dimension would leave no unit stride; any other dimension may be expanded.
    const std::size_t expanded =
        expand && layout == Layout::random && rank > 1 ? Random(layout_seed, 0xE4).bits(0) % (rank - 1) : rank;
    std::int64_t extent = 1;
    std::int64_t first = a.shift;
    for (std::size_t i = rank; i-- > 0;) {
        const std::size_t d = a.order[i];
        if (d == expanded) {
            view_.strides[d] = 0;
            continue;
        }
        const std::int64_t size = std::max<std::int64_t>(view_.shape[d], 1);
        view_.strides[d] = a.reversed[d] ? -extent : extent;
        if (a.reversed[d]) first += (size - 1) * extent;
        extent = extent * size + a.gap[d];
    }
    const auto element = static_cast<std::size_t>(size_of(dtype));
    const std::size_t elements = view_.size() == 0 ? 0 : static_cast<std::size_t>(extent + a.shift);
    memory_.assign(elements * element + 2 * kBand, kPoison);
    // operator new aligns to 16 bytes at least, so the band keeps elements aligned.
    view_.data = memory_.data() + kBand + static_cast<std::size_t>(view_.size() == 0 ? 0 : first) * element;
}

GuardedTensor::GuardedTensor(const TensorView& layout, std::int64_t first, std::int64_t elements)
    : memory_(static_cast<std::size_t>(elements * size_of(layout.dtype)) + 2 * kBand, kPoison), view_(layout) {
    view_.data = memory_.data() + kBand + first * size_of(layout.dtype);
}

GuardedTensor GuardedTensor::beside(const TensorView& layout, std::int64_t first) {
    GuardedTensor other;
    other.view_ = layout;
    other.view_.data = memory_.data() + kBand + first * size_of(layout.dtype);
    return other;
}

void GuardedTensor::poison() { std::fill(memory_.begin(), memory_.end(), kPoison); }

bool GuardedTensor::unchanged(bool elements_too) const {
    if (elements_too) return memory_ == before_;
    std::vector<std::byte> expected = before_;
    for_each_element(view_, [&](std::int64_t, const std::byte* element) {
        std::copy_n(element, size_of(view_.dtype), expected.begin() + (element - memory_.data()));
    });
    return memory_ == expected;
}

GuardedWorkspace::GuardedWorkspace(std::size_t bytes)
    : memory_(bytes + 2 * kBand + Plan::kWorkspaceAlignment, kPoison), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kBand);
    first_ = kBand + (Plan::kWorkspaceAlignment - address % Plan::kWorkspaceAlignment) % Plan::kWorkspaceAlignment;
}

bool GuardedWorkspace::bands_unchanged() const {
    const auto poisoned = [](std::byte b) { return b == kPoison; };
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(first_);
    return std::all_of(memory_.begin(), begin, poisoned) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), poisoned);
}

}  // namespace tessera::check
