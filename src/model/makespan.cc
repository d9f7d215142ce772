// SPDX-License-Identifier: Apache-2.0
#include "model/makespan.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace tessera::model {
namespace {

/// A multiprocessor and the remaining clocks of its blocks.
class Multiprocessor {
 public:
    /// Starts a block of `clocks` clocks.
    void begin(double clocks) { left_.push_back(clocks); }
    bool idle() const { return left_.empty(); }
    double now() const { return now_; }

    /// The time at which the next of its blocks is done.
    double next_done(double single_block_factor) const {
        return now_ + *std::min_element(left_.begin(), left_.end()) * clocks_per_clock(single_block_factor);
    }
    /// Advances to that time and removes the block.
    void finish_next(double single_block_factor) {
        const auto first = std::min_element(left_.begin(), left_.end());
        const double done = *first;
        now_ += done * clocks_per_clock(single_block_factor);
        left_.erase(first);
        for (double& left : left_) left -= done;
    }

 private:
    /// The time in which each resident block advances by one clock.
    double clocks_per_clock(double single_block_factor) const {
        return left_.size() == 1 ? single_block_factor : static_cast<double>(left_.size());
    }

    std::vector<double> left_;
    double now_ = 0;
};

}  // namespace

double makespan(std::span<const double> blocks, const SmSlots& slots) {
    std::vector<Multiprocessor> all(static_cast<std::size_t>(slots.multiprocessors));
    const std::size_t first = std::min(blocks.size(), all.size() * static_cast<std::size_t>(slots.per_sm));
    for (std::size_t i = 0; i < first; ++i) all[i % all.size()].begin(blocks[i]);
    using Event = std::pair<double, std::size_t>;  // time at which the next block is done, and its multiprocessor
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    const auto expect = [&](std::size_t which) {
        if (!all[which].idle()) events.emplace(all[which].next_done(slots.single_block_factor), which);
    };
    for (std::size_t i = 0; i < all.size(); ++i) expect(i);
    double last = 0;
    for (std::size_t next = first; !events.empty();) {
        const std::size_t which = events.top().second;
        events.pop();
        all[which].finish_next(slots.single_block_factor);
        last = std::max(last, all[which].now());
        if (next < blocks.size()) all[which].begin(blocks[next++]);
        expect(which);
    }
    return last;
}

}  // namespace tessera::model
