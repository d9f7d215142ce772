// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "diagnose/name.hpp"
#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// One attention that is made of plain kernels: product, softmax, product, and what stands between them.
struct ByHand {
    KernelPass pass = KernelPass::forward;
    std::vector<std::uint32_t> runs;  ///< in Trace::runs, in the order of time
    std::uint32_t first_product = 0;  ///< Q K^T in the forward
    std::uint32_t softmax = 0;
};

/// What is asked of a run of the trace: its role, and for a softmax the rank of its input (0: not told).
struct RunFacts {
    std::function<Role(std::uint32_t run)> role;
    std::function<int(std::uint32_t run)> softmax_rank;
    std::function<bool(std::uint32_t run)> taken;  ///< it belongs to another call already
};

/// Finds them by the order of runs on each stream. A softmax over a matrix of rank 2 is none (it chooses experts or
/// words), nor one with something else than elementwise kernels between it and the two products.
std::vector<ByHand> find_by_hand(const Trace& trace, const RunFacts& facts);

}  // namespace tessera::diagnose
