// SPDX-License-Identifier: Apache-2.0
#include "model/deal.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace tessera::model {
namespace {

/// A multiprocessor and the remaining work of its blocks.
class Multiprocessor {
 public:
    /// Starts a block of `clocks` clocks.
    void begin(double clocks) { left_.push_back(clocks); }
    bool idle() const { return left_.empty(); }
    double now() const { return now_; }

    /// The time at which the next of its blocks is done.
    double next_done(double alone) const {
        return now_ + *std::min_element(left_.begin(), left_.end()) * clocks_per_clock(alone);
    }
    /// Advances to that time and removes the block.
    void finish_next(double alone) {
        const auto first = std::min_element(left_.begin(), left_.end());
        const double done = *first;
        now_ += done * clocks_per_clock(alone);
        left_.erase(first);
        for (double& left : left_) left -= done;
    }

 private:
    /// The time of one clock's work of one block.
    double clocks_per_clock(double alone) const {
        return left_.size() == 1 ? alone : static_cast<double>(left_.size());
    }

    std::vector<double> left_;
    double now_ = 0;
};

}  // namespace

double dealt(std::span<const double> blocks, const Seats& seats) {
    std::vector<Multiprocessor> all(static_cast<std::size_t>(seats.multiprocessors));
    const std::size_t first = std::min(blocks.size(), all.size() * static_cast<std::size_t>(seats.each));
    for (std::size_t i = 0; i < first; ++i) all[i % all.size()].begin(blocks[i]);
    using Event = std::pair<double, std::size_t>;  // time at which the next block is done, and its multiprocessor
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    const auto expect = [&](std::size_t which) {
        if (!all[which].idle()) events.emplace(all[which].next_done(seats.alone), which);
    };
    for (std::size_t i = 0; i < all.size(); ++i) expect(i);
    double last = 0;
    for (std::size_t next = first; !events.empty();) {
        const std::size_t which = events.top().second;
        events.pop();
        all[which].finish_next(seats.alone);
        last = std::max(last, all[which].now());
        if (next < blocks.size()) all[which].begin(blocks[next++]);
        expect(which);
    }
    return last;
}

}  // namespace tessera::model
