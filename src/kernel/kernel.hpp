// SPDX-License-Identifier: Apache-2.0
//
// What a backend gives to the registry: an ordered list of these rows, and nothing else.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "tessera/attention.hpp"
#include "tessera/kernel.hpp"
#include "tessera/plan.hpp"

namespace tessera {

/// A validated call, ready to run.
template <class Args>
struct Call {
    const Plan& plan;
    const Args& args;
    std::span<std::byte> workspace;
    ParallelFor parallel_for;  ///< never empty
    TileCounters* counters;    ///< may be null
    void* stream;
};
using ForwardCall = Call<ForwardArgs>;
using BackwardCall = Call<BackwardArgs>;

struct Kernel {
    KernelInfo info;
    /// Why this kernel can't run the Problem (with this tile, when the caller names one); empty when it can.
    /// dtype and pass are checked by plan() before.
    std::optional<std::string> (*refuse)(const Problem& problem, const std::optional<Tile>& tile);
    /// Depends on head_dim, dtype and target only, never on batch or lengths: bits must not depend on neighbours.
    Tile (*default_tile)(const Problem& problem);
    /// For a Plan whose problem, pass, tile and threads are set.
    std::size_t (*workspace_bytes)(const Plan& plan);
    std::string (*target)();
    void (*forward)(const ForwardCall& call);    ///< null for a backward kernel
    void (*backward)(const BackwardCall& call);  ///< null for a forward kernel
};

}  // namespace tessera
