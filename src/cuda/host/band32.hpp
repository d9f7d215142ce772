// SPDX-License-Identifier: Apache-2.0
//
// A mask's band, and ranges of queries, keys and blocks, in the 32-bit numbers that kernels count in. Plain C++.
#pragma once

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// Queries, keys or blocks begin ... end - 1; empty where begin >= end.
struct Span {
    int begin, end;

    TESSERA_HOST_DEVICE constexpr int count() const { return end - begin; }
    TESSERA_HOST_DEVICE constexpr bool contains(int n) const { return n >= begin && n < end; }
};

/// A Band in 32 bits: query q sees keys max(q + low, 0) ... min(q + high, last_key).
struct Band32 {
    int low = 0;
    int high = 0;
    int last_key = -1;

    Band32() = default;
    TESSERA_HOST_DEVICE constexpr Band32(int lowest, int highest, int last)
        : low(lowest), high(highest), last_key(last) {}
    /// Clamps bounds beyond all queries and keys, so that their sums with an index fit.
    TESSERA_HOST_DEVICE explicit constexpr Band32(const Band& band)
        : low(static_cast<int>(larger(band.low, -band.len_q))),
          high(static_cast<int>(smaller(band.high, band.len_kv))),
          last_key(static_cast<int>(band.len_kv) - 1) {}

    /// First key that a query sees; negative stands for 0.
    TESSERA_HOST_DEVICE constexpr int first(int query) const { return query + low; }
    /// Last key that a query sees; less than first() where it sees none.
    TESSERA_HOST_DEVICE constexpr int last(int query) const { return smaller(query + high, last_key); }
    /// Does any of queries [q_begin, q_end) see any key?
    TESSERA_HOST_DEVICE constexpr bool any(int q_begin, int q_end) const {
        return low <= high && larger(first(q_begin), 0) <= last(q_end - 1);
    }
    /// Do queries [q_begin, q_end) all see all of keys [begin, end)?
    TESSERA_HOST_DEVICE constexpr bool full(int q_begin, int q_end, int begin, int end) const {
        return begin >= first(q_end - 1) && end - 1 <= last(q_begin);
    }
    /// Is the pair visible?
    TESSERA_HOST_DEVICE constexpr bool sees(int query, int key) const {
        return key >= first(query) && key <= last(query);
    }

 private:
    template <class T>
    TESSERA_HOST_DEVICE static constexpr T larger(T a, T b) {
        return a > b ? a : b;
    }
    template <class T>
    TESSERA_HOST_DEVICE static constexpr T smaller(T a, T b) {
        return a < b ? a : b;
    }
};

}  // namespace tessera::cuda
