// SPDX-License-Identifier: Apache-2.0
#include "llama/pages.hpp"

#include <algorithm>
#include <stdexcept>

namespace llama {

PageAllocator::PageAllocator(std::int32_t pages) : taken_(static_cast<std::size_t>(pages)) {
    for (std::int32_t page = pages; page-- > 0;) free_.push_back(page);
}

std::optional<std::int32_t> PageAllocator::take() {
    if (free_.empty()) return std::nullopt;
    const std::int32_t page = free_.back();
    free_.pop_back();
    taken_[static_cast<std::size_t>(page)] = true;
    most_used_ = std::max(most_used_, used());
    return page;
}

void PageAllocator::give_back(std::int32_t page) {
    if (page < 0 || page >= total() || !taken_[static_cast<std::size_t>(page)]) {
        throw std::logic_error("give_back: expected a page that is taken, got " + std::to_string(page));
    }
    taken_[static_cast<std::size_t>(page)] = false;
    free_.push_back(page);
}

}  // namespace llama
