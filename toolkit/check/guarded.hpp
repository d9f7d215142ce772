// SPDX-License-Identifier: Apache-2.0
//
// Guarded memory: every byte outside the elements is filled with a pattern before a call and must have that pattern
// after it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "tessera/tensor.hpp"

namespace tessera::check {

/// A tensor in its own memory, with gaps and guard bands full of NaN (bytes 0xFF are NaN in every floating dtype).
class GuardedTensor {
 public:
    GuardedTensor() = default;
    /// `layout_seed` decides a random layout; `expand` (inputs only) gives one dimension stride 0.
    GuardedTensor(DType dtype, std::initializer_list<std::int64_t> shape, Layout layout, std::uint64_t layout_seed,
                  bool expand = false);
    /// The shape and strides of a view, whose first element is element `first` of memory of this many elements.
    GuardedTensor(const TensorView& layout, std::int64_t first, std::int64_t elements);
    /// An input in the memory of this one, which guards both. memory() of the result is empty.
    GuardedTensor beside(const TensorView& layout, std::int64_t first);
    GuardedTensor(GuardedTensor&&) = default;
    GuardedTensor& operator=(GuardedTensor&&) = default;

    const TensorView& view() const { return view_; }
    /// All memory, including gaps and guard bands.
    std::span<std::byte> memory() { return memory_; }

    /// Poisons every byte, elements included.
    void poison();
    /// Records the value of every byte.
    void snapshot() { before_ = memory_; }
    /// True if no byte has changed since snapshot(). If `elements_too` is false, the elements may change (an output).
    bool unchanged(bool elements_too) const;

 private:
    std::vector<std::byte> memory_;
    std::vector<std::byte> before_;
    TensorView view_{};
};

/// A poisoned workspace with guard bands.
class GuardedWorkspace {
 public:
    explicit GuardedWorkspace(std::size_t bytes);
    std::span<std::byte> span() { return {memory_.data() + first_, bytes_}; }
    bool bands_unchanged() const;

 private:
    std::vector<std::byte> memory_;
    std::size_t first_ = 0;
    std::size_t bytes_ = 0;
};

}  // namespace tessera::check
