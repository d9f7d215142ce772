// SPDX-License-Identifier: Apache-2.0
//
// Guarded memory: every byte that no element owns is poison before a call and must be poison after it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "tessera/tensor.hpp"

namespace tessera::check {

/// A tensor in memory of its own, with gaps and guard bands full of NaN (bytes 0xFF: NaN in every floating dtype).
class GuardedTensor {
 public:
    GuardedTensor() = default;
    /// `layout_seed` decides a random layout; `expand` (inputs only) gives one dimension stride 0.
    GuardedTensor(DType dtype, std::initializer_list<std::int64_t> shape, Layout layout, std::uint64_t layout_seed,
                  bool expand = false);
    GuardedTensor(GuardedTensor&&) = default;
    GuardedTensor& operator=(GuardedTensor&&) = default;

    const TensorView& view() const { return view_; }
    /// Everything, gaps and guard bands included.
    std::span<std::byte> memory() { return memory_; }

    /// Poisons every byte, elements included.
    void poison();
    /// Remembers every byte.
    void snapshot() { before_ = memory_; }
    /// Has any byte changed since snapshot()? `elements_too`: false lets the elements change (an output).
    bool unchanged(bool elements_too) const;

 private:
    std::vector<std::byte> memory_;
    std::vector<std::byte> before_;
    TensorView view_{};
};

/// A workspace with guard bands, poisoned.
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
