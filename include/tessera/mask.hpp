// SPDX-License-Identifier: Apache-2.0
//
// A Mask is the rule for which keys a query sees (causal, window). Bound to the two lengths it becomes a Band, which
// answers the only three questions that a kernel asks: is (q, k) visible, which keys does a block of queries touch, and
// is a tile full, partial or empty. Everything is constexpr and runs on host and device.
#pragma once

#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

#pragma GCC visibility push(default)
namespace tessera {

/// The place of the causal diagonal where len_q != len_kv. Libraries differ in it, so it is always named.
enum class Causal : std::uint8_t {
    none,
    bottom_right,  ///< the last query sees the last key: key <= query + len_kv - len_q (flash-attn, serving)
    top_left,      ///< the first query sees the first key only: key <= query (torch)
};

/// The width of a window side without limit.
inline constexpr std::int64_t unbounded = std::numeric_limits<std::int64_t>::max();

/// Half-open interval of indices.
struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    TESSERA_HOST_DEVICE constexpr std::int64_t size() const { return end > begin ? end - begin : 0; }
    TESSERA_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
    friend bool operator==(const Range&, const Range&) = default;
};

enum class Coverage : std::uint8_t { empty, partial, full };

/// A mask bound to lengths. Every mask of the contract is one diagonal band:
/// key k is visible to query q  <=>  0 <= k < len_kv  and  q + low <= k <= q + high.
struct Band {
    std::int64_t len_q = 0;
    std::int64_t len_kv = 0;
    std::int64_t low = 0;   ///< lowest visible key minus query
    std::int64_t high = 0;  ///< highest visible key minus query

    TESSERA_HOST_DEVICE constexpr bool visible(std::int64_t q, std::int64_t k) const {
        return k >= 0 && k < len_kv && k >= q + low && k <= q + high;
    }

    /// The keys that query `q` sees.
    TESSERA_HOST_DEVICE constexpr Range row(std::int64_t q) const { return kv_range(q, q + 1); }

    /// The smallest range of keys that holds every key seen by queries [q_begin, q_end).
    TESSERA_HOST_DEVICE constexpr Range kv_range(std::int64_t q_begin, std::int64_t q_end) const {
        if (q_begin >= q_end || low > high) return {};
        return clipped(q_begin + low, q_end - 1 + high + 1, len_kv);
    }

    /// The smallest range of queries that holds every query seeing one of the keys [kv_begin, kv_end).
    TESSERA_HOST_DEVICE constexpr Range q_range(std::int64_t kv_begin, std::int64_t kv_end) const {
        if (kv_begin >= kv_end || low > high) return {};
        return clipped(kv_begin - high, kv_end - 1 - low + 1, len_q);
    }

    /// Does the tile of queries [q_begin, q_end) x keys [kv_begin, kv_end) need work, and does it need mask code?
    TESSERA_HOST_DEVICE constexpr Coverage coverage(std::int64_t q_begin, std::int64_t q_end, std::int64_t kv_begin,
                                                    std::int64_t kv_end) const {
        const Range touched = kv_range(q_begin, q_end);
        const bool disjoint = touched.begin >= kv_end || touched.end <= kv_begin;
        if (disjoint || touched.empty() || kv_begin >= kv_end) return Coverage::empty;
        const bool full = kv_begin >= q_end - 1 + low && kv_end - 1 <= q_begin + high && kv_end <= len_kv;
        return full ? Coverage::full : Coverage::partial;
    }

    /// Number of visible (query, key) pairs. The FLOP of attention are proportional to it.
    TESSERA_HOST_DEVICE constexpr std::int64_t visible_pairs() const {
        std::int64_t pairs = 0;
        for (std::int64_t q = 0; q < len_q; ++q) pairs += row(q).size();
        return pairs;
    }

 private:
    TESSERA_HOST_DEVICE static constexpr Range clipped(std::int64_t begin, std::int64_t end, std::int64_t limit) {
        begin = begin < 0 ? 0 : begin;
        end = end > limit ? limit : end;
        return begin < end ? Range{begin, end} : Range{};
    }
};

/// The rule of a mask. The window is inclusive on both sides and relative to the bottom-right diagonal: query q sees
/// keys q + len_kv - len_q - window_left ... q + len_kv - len_q + window_right. A key must pass both, causal and
/// window.
struct Mask {
    Causal causal = Causal::none;
    std::int64_t window_left = unbounded;
    std::int64_t window_right = unbounded;

    TESSERA_HOST_DEVICE constexpr Band bind(std::int64_t len_q, std::int64_t len_kv) const {
        const std::int64_t diagonal = len_kv - len_q;
        const std::int64_t all = len_q + len_kv;  // beyond every key: stands for "no limit" without overflow
        const std::int64_t left = window_left < all ? window_left : all;
        const std::int64_t right = window_right < all ? window_right : all;
        Band band{len_q, len_kv, diagonal - left, diagonal + right};
        if (causal == Causal::bottom_right && band.high > diagonal) band.high = diagonal;
        if (causal == Causal::top_left && band.high > 0) band.high = 0;
        return band;
    }

    TESSERA_HOST_DEVICE constexpr bool trivial() const {
        return causal == Causal::none && window_left == unbounded && window_right == unbounded;
    }

    friend bool operator==(const Mask&, const Mask&) = default;
};

}  // namespace tessera
#pragma GCC visibility pop
