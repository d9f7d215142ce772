// SPDX-License-Identifier: Apache-2.0
//
// Attention of a few queries and keys that a person can redo with a pencil. The scale is ln 2, so that exp(scale * q.k)
// is 2^(q.k). With whole numbers in Q, K and V, every weight is a power of two and every result a fraction.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/mask.hpp"
#include "walk/fraction.hpp"

namespace tessera::walk {

inline constexpr std::int64_t kHandLen = 4;  ///< number of queries and of keys in the built-in example
inline constexpr std::int64_t kHandDim = 2;
inline constexpr std::int64_t kHandBlock = 2;    ///< number of queries and of keys in one of its tiles
inline constexpr std::int64_t kMostHandLen = 8;  ///< largest number of queries or keys in a user's example
inline constexpr std::int64_t kMostHandValue = 9;

using HandMatrix = std::vector<std::array<std::int64_t, kHandDim>>;
using HandVector = std::array<Fraction, kHandDim>;

/// The inputs of the built-in example as whole numbers. The backward uses dO.
extern const HandMatrix kHandQ, kHandK, kHandV, kHandDo;

/// An example: inputs of whole numbers, and the size of its tiles.
struct HandExample {
    HandMatrix q = kHandQ;     ///< [len_q, 2]
    HandMatrix k = kHandK;     ///< [len_kv, 2]
    HandMatrix v = kHandV;     ///< [len_kv, 2]
    HandMatrix d_o = kHandDo;  ///< [len_q, 2]
    Tile tile{kHandBlock, kHandBlock};

    std::int64_t len_q() const { return static_cast<std::int64_t>(q.size()); }
    std::int64_t len_kv() const { return static_cast<std::int64_t>(k.size()); }
    /// Throws Error(invalid_argument) naming "q", "k", "v", "do" or "tile". It refuses no rows, more than kMostHandLen
    /// rows, values beyond kMostHandValue, and different lengths of K and V or of Q and dO.
    void validate() const;
};

/// One step of the online softmax: a query and a tile of keys.
struct HandStep {
    std::int64_t row = 0;
    Range keys;
    Coverage coverage = Coverage::full;
    std::vector<std::optional<std::int64_t>> s{};  ///< q.k of each key, in units of ln 2; none for hidden keys
    std::optional<std::int64_t> old_m{};           ///< before the step, in units of ln 2; empty: no key seen yet
    std::optional<std::int64_t> m{};               ///< after the step
    Fraction rescale{};                            ///< 2^(old m - m), 0 at the first
    std::vector<Fraction> p{};                     ///< 2^(s - m)
    Fraction old_l{};
    Fraction l{};
    HandVector old_o{};
    HandVector add_o{};  ///< sum of p v over the tile (fa1: divided by the new l)
    HandVector o{};      ///< fa1: divided by l at every step
};

/// The final values of a query.
struct HandRow {
    std::optional<std::int64_t> m{};  ///< empty: the query sees no key
    Fraction l{};
    HandVector o{};              ///< final
    std::vector<Fraction> p{};   ///< [len_kv] P, 0 for hidden keys
    Fraction delta{};            ///< backward: D = dO . O
    std::vector<Fraction> dp{};  ///< [len_kv] dO . v
    std::vector<Fraction> ds{};  ///< [len_kv] p (dP - D)
    HandVector dq{};             ///< in units of ln 2
};

/// One tile of the backward: the recomputed values, and the sums after it.
struct HandGradientStep {
    Range queries;
    Range keys;
    Coverage coverage = Coverage::full;
    std::vector<HandVector> dq{};  ///< [queries of the tile], in units of ln 2, with this tile
    std::vector<HandVector> dk{};  ///< [keys of the tile], in units of ln 2, with this tile
    std::vector<HandVector> dv{};  ///< [keys of the tile], with this tile
};

struct Hand {
    HandExample example;
    Schedule schedule = Schedule::fa2;
    Mask mask;
    std::vector<HandStep> steps;  ///< in the order of the schedule; tiles that the mask skips are left out
    std::vector<HandRow> rows;    ///< [len_q]
    std::vector<HandGradientStep> gradient_steps;  ///< in the order of the schedule, skipped tiles left out; P and dS
                                                   ///< of a tile stand in `rows`
    std::vector<HandVector> dk;                    ///< [len_kv], in units of ln 2
    std::vector<HandVector> dv;                    ///< [len_kv]
};

/// Computes the example by a schedule; fa3 is fa2 here. Forward: fa1 loops over key tiles, then queries, and divides O
/// by l at every step. fa2 loops over query tiles and divides O at the end; standard takes all keys at once. Backward:
/// key tiles are the outer loop; standard takes all at once. Throws as HandExample::validate().
Hand work_by_hand(const HandExample& example, Schedule schedule, const Mask& mask);

/// Computes the built-in example.
Hand work_by_hand(Schedule schedule, const Mask& mask);

}  // namespace tessera::walk
