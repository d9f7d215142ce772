// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace tessera {

/// a * b for counts >= 0, cut at 2^62 where it would overflow: an Arena calls that too much.
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
    constexpr std::int64_t kLimit = std::int64_t{1} << 62;
    std::int64_t product = 0;  // a division would take longer than all the rest of take()
    return __builtin_mul_overflow(a, b, &product) || product > kLimit ? kLimit : product;
}

/// Hands out aligned arrays from the caller's workspace, one after another. Without memory it only adds up, so the same
/// code that lays a workspace out also tells its size: the two cannot disagree.
class Arena {
 public:
    static constexpr std::size_t kAlignment = 64;
    /// Sizes saturate here instead of wrapping. No machine has this much memory.
    static constexpr std::size_t kTooMuch = std::numeric_limits<std::size_t>::max() / 4;

    Arena() = default;
    explicit Arena(std::span<std::byte> memory) : base_(memory.data()) {}

    /// An array of as many elements as the product of the counts; the product saturates too.
    template <class T, class... Counts>
    T* take(Counts... counts) {
        std::int64_t count = 1;
        ((count = saturating_product(count, counts > 0 ? counts : 0)), ...);
        const auto n = static_cast<std::size_t>(count);
        const std::size_t at = used_;
        if (n > (kTooMuch - kAlignment) / sizeof(T) || used_ >= kTooMuch - n * sizeof(T) - kAlignment) {
            used_ = kTooMuch;
            return nullptr;
        }
        used_ += (n * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
    }

    std::size_t used() const { return used_; }

 private:
    std::byte* base_ = nullptr;
    std::size_t used_ = 0;
};

/// Memory of the same size for each worker, one after another. A worker lays its own out when it begins: laying out all
/// of them before the first task would take longer than a short call.
class WorkerMemory {
 public:
    WorkerMemory() = default;
    /// lay_out(arena) reserves the memory of one worker.
    template <class LayOut>
    WorkerMemory(Arena& arena, int workers, const LayOut& lay_out) {
        Arena one;
        lay_out(one);
        bytes_ = one.used();
        base_ = arena.take<std::byte>(workers, static_cast<std::int64_t>(bytes_));
    }
    Arena arena(int worker) const { return Arena({base_ + static_cast<std::size_t>(worker) * bytes_, bytes_}); }

 private:
    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace tessera
