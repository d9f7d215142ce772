// SPDX-License-Identifier: Apache-2.0
//
// The schedule of backward tiles on the matrix path. It keeps dQ summed over ascending keys, and dK and dV over
// ascending queries. A stripe is a subset of a head's queries. It takes the key blocks from first to last, each after
// the previous stripe of the head has taken that block. Any worker may run a stripe's next block, so a slow core delays
// others by at most one block, and the order of every sum is fixed.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace tessera::cpu::fa2::matrix_path {

class Stripes {
 public:
    /// Makes `per_head` stripes for every head.
    Stripes(std::int64_t heads, std::int64_t per_head)
        : per_head_(per_head), stripes_(static_cast<std::size_t>(heads * per_head)) {}

    struct Block {
        std::int64_t head;
        std::int64_t stripe;  ///< index of the stripe in its head
        std::int64_t block;   ///< index of the key block
        bool last_of_stripe;
        bool last_of_block;  ///< no other stripe of the head takes this block later
    };

    /// Sets the number of key blocks of every stripe of the head.
    void set_blocks(std::int64_t head, std::int64_t blocks) {
        for (std::int64_t stripe = 0; stripe < per_head_; ++stripe) at(head, stripe).left = blocks;
    }

    /// Calls run(block) until no work is left for this worker. It waits only for blocks that other workers are running.
    template <class Run>
    void work(const Run& run) {
        while (const std::optional<Block> block = take()) {
            try {
                run(*block);
            } catch (...) {
                const std::scoped_lock lock(mutex_);
                failed_ = true;
                throw;
            }
            finish(*block);
        }
    }

 private:
    struct Stripe {
        std::int64_t left = 0;  ///< blocks that it has left
        std::int64_t next = 0;
        bool running = false;
    };

    Stripe& at(std::int64_t head, std::int64_t stripe) {
        return stripes_[static_cast<std::size_t>(head * per_head_ + stripe)];
    }

    /// Takes the next ready block, from the stripe that has the most left.
    std::optional<Block> take() {
        while (true) {
            {
                const std::scoped_lock lock(mutex_);
                Stripe* best = nullptr;
                bool any_left = false;
                for (Stripe& s : stripes_) {
                    any_left = any_left || s.left > 0;
                    if (ready(s) && (best == nullptr || s.left > best->left)) best = &s;
                }
                if (failed_ || !any_left) return std::nullopt;
                if (best != nullptr) return begin(*best);
            }
            std::this_thread::yield();
        }
    }

    bool ready(const Stripe& s) const {
        if (s.left == 0 || s.running) return false;
        const bool first = (&s - stripes_.data()) % per_head_ == 0;
        return first || (&s)[-1].next > s.next;
    }

    Block begin(Stripe& s) {
        s.running = true;
        const std::int64_t index = &s - stripes_.data();
        return {index / per_head_, index % per_head_, s.next, s.left == 1, index % per_head_ == per_head_ - 1};
    }

    void finish(const Block& block) {
        const std::scoped_lock lock(mutex_);
        Stripe& s = at(block.head, block.stripe);
        s.running = false;
        ++s.next;
        --s.left;
    }

    std::int64_t per_head_;
    std::vector<Stripe> stripes_;
    std::mutex mutex_;
    bool failed_ = false;
};

}  // namespace tessera::cpu::fa2::matrix_path
