// SPDX-License-Identifier: Apache-2.0
//
// What a schedule moves, computes and holds: counts, exact and without a device. docs/model.md tells the rules.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
namespace tessera {

/// Bytes moved. `l2`: between a multiprocessor and what all share (on a CPU: beyond the core's own caches). `dram`:
/// the part of those that also crosses the device memory's bus. `shared`: into and out of a multiprocessor's own
/// memory.
struct Bytes {
    std::int64_t dram = 0;
    std::int64_t l2 = 0;
    std::int64_t shared = 0;
    friend bool operator==(const Bytes&, const Bytes&) = default;
};

struct Work {
    Bytes bytes{};
    std::int64_t flop = 0;  ///< of matrix products, for pairs that the mask lets through
    std::int64_t exps = 0;  ///< for the same pairs
    Work& operator+=(const Work& other);
    friend bool operator==(const Work&, const Work&) = default;
};
Work operator*(std::int64_t times, const Work& work);

/// What a whole schedule costs.
struct Cost {
    Work work{};
    std::int64_t full = 0;      ///< tiles whose pairs are all visible
    std::int64_t partial = 0;   ///< tiles with visible and hidden pairs
    std::int64_t skipped = 0;   ///< tiles without a visible pair
    std::int64_t elements = 0;  ///< pairs of the tiles that run, hidden ones too: what hardware computes
    std::int64_t pairs = 0;     ///< visible ones
    Cost& operator+=(const Cost& other);
    friend bool operator==(const Cost&, const Cost&) = default;
};
Cost operator*(std::int64_t times, const Cost& cost);

/// Bytes of memory at the peak: tensors of the call and what the schedule keeps beside them.
struct Footprint {
    std::int64_t tensors = 0;    ///< inputs and outputs
    std::int64_t workspace = 0;  ///< S and P; O, m, l; dQ, D
    std::int64_t total() const { return tensors + workspace; }
};

}  // namespace tessera
#pragma GCC visibility pop
