// SPDX-License-Identifier: Apache-2.0
//
// The exact counts of what a schedule moves, computes and holds, without a device. docs/model.md has the rules.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
namespace tessera {

/// Bytes moved. `l2` is traffic between a multiprocessor and the L2 cache (on a CPU: beyond the core's own caches).
/// `dram` is the part of it that crosses the bus of the device memory. `shared` is traffic into and out of shared
/// memory.
struct Bytes {
    std::int64_t dram = 0;
    std::int64_t l2 = 0;
    std::int64_t shared = 0;
    friend bool operator==(const Bytes&, const Bytes&) = default;
};

struct Work {
    Bytes bytes{};
    std::int64_t flop = 0;  ///< FLOP of the matrix products of visible pairs
    std::int64_t exps = 0;  ///< exponentials of visible pairs
    Work& operator+=(const Work& other);
    friend bool operator==(const Work&, const Work&) = default;
};
Work operator*(std::int64_t times, const Work& work);

/// The cost of a whole schedule.
struct Cost {
    Work work{};
    std::int64_t full = 0;      ///< tiles whose pairs are all visible
    std::int64_t partial = 0;   ///< tiles with visible and hidden pairs
    std::int64_t skipped = 0;   ///< tiles without a visible pair
    std::int64_t elements = 0;  ///< pairs that the hardware computes: all pairs of the tiles that run
    std::int64_t pairs = 0;     ///< visible pairs
    Cost& operator+=(const Cost& other);
    friend bool operator==(const Cost&, const Cost&) = default;
};
Cost operator*(std::int64_t times, const Cost& cost);

/// Bytes of memory at the peak: the tensors of the call and the workspace of the schedule.
struct Footprint {
    std::int64_t tensors = 0;  ///< inputs and outputs
    /// The tensors that a schedule keeps between kernels or passes. Forward: S and P (standard); O, m and l (fa1).
    /// Backward: P, dS and delta (standard); dQ (fa1); dQ and delta (fa2, fa3).
    std::int64_t workspace = 0;
    std::int64_t total() const { return tensors + workspace; }
};

}  // namespace tessera
#pragma GCC visibility pop
