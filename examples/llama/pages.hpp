// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace llama {

/// Hands out the pages of the cache, each to one sequence at a time. A page has the same number in every layer.
class PageAllocator {
 public:
    explicit PageAllocator(std::int32_t pages);

    /// A free page, or nothing. The page given back last comes first, because its memory is the likeliest to be cached.
    std::optional<std::int32_t> take();

    /// Throws std::logic_error for a page that is free already: two sequences would write to it.
    void give_back(std::int32_t page);

    std::int64_t total() const { return static_cast<std::int64_t>(taken_.size()); }
    std::int64_t used() const { return total() - static_cast<std::int64_t>(free_.size()); }
    std::int64_t most_used() const { return most_used_; }

 private:
    std::vector<std::int32_t> free_;
    std::vector<bool> taken_;
    std::int64_t most_used_ = 0;
};

}  // namespace llama
