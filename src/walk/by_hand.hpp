// SPDX-License-Identifier: Apache-2.0
//
// Attention of 4 queries and 4 keys that a person can redo with a pencil. The scale is ln 2, so exp(scale * q.k) is
// 2^(q.k): with whole numbers in Q, K and V every weight is a power of two and every result a fraction.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/mask.hpp"
#include "walk/fraction.hpp"

namespace tessera::walk {

inline constexpr std::int64_t kHandLen = 4;
inline constexpr std::int64_t kHandDim = 2;
inline constexpr std::int64_t kHandBlock = 2;  ///< queries and keys of a tile

using HandMatrix = std::array<std::array<std::int64_t, kHandDim>, kHandLen>;
using HandVector = std::array<Fraction, kHandDim>;

/// The inputs, whole numbers. dO is for the backward.
extern const HandMatrix kHandQ, kHandK, kHandV, kHandDo;

/// One query against one tile of keys.
struct HandStep {
    std::int64_t row = 0;
    Range keys;
    Coverage coverage = Coverage::full;
    std::vector<std::optional<std::int64_t>> s{};  ///< q.k of each key, in units of ln 2; none where hidden
    std::optional<std::int64_t> old_m{};           ///< before, in units of ln 2; none: no key seen yet
    std::optional<std::int64_t> m{};               ///< after
    Fraction rescale{};                            ///< 2^(old m - m), 0 at the first
    std::vector<Fraction> p{};                     ///< 2^(s - m)
    Fraction old_l{};
    Fraction l{};
    HandVector old_o{};
    HandVector add_o{};  ///< sum of p v over the tile (fa1: divided by the new l)
    HandVector o{};      ///< fa1: divided by l at every step
};

/// What a query ends with.
struct HandRow {
    std::optional<std::int64_t> m{};
    Fraction l{};
    HandVector o{};             ///< final
    std::vector<Fraction> p{};  ///< [4] weights, 0 where hidden
    // Backward, with D = dO . O:
    Fraction delta{};
    std::vector<Fraction> dp{};  ///< [4] dO . v
    std::vector<Fraction> ds{};  ///< [4] p (dP - D)
    HandVector dq{};             ///< in units of ln 2
};

struct Hand {
    Schedule schedule = Schedule::fa2;
    Mask mask;
    std::vector<HandStep> steps;  ///< in the order of the schedule; tiles that the mask skips are left out
    std::array<HandRow, kHandLen> rows;
    std::array<HandVector, kHandLen> dk;  ///< in units of ln 2
    std::array<HandVector, kHandLen> dv;
};

/// fa1: key tiles outer, queries inner, O divided by l at every step; fa2: query tiles outer, O divided at the end;
/// standard: all keys at once. fa3 is fa2 here.
Hand work_by_hand(Schedule schedule, const Mask& mask);

}  // namespace tessera::walk
