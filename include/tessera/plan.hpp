// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// What the caller wants of the choice. Everything left out is chosen by plan().
struct PlanOptions {
    Pass pass = Pass::forward;
    std::optional<Backend> backend{};
    std::optional<Schedule> schedule{};
    std::string kernel{};        ///< exact name of a kernel; empty: any
    std::optional<Tile> tile{};  ///< default: the kernel's own for this head_dim and dtype
    int threads = 0;             ///< 0: one per core that this process may use; 1..1024
};

/// A kernel that will not run, and why.
struct Refusal {
    const KernelInfo* kernel = nullptr;
    std::string reason;
    bool capable = false;  ///< true: it could run this Problem, but another kernel comes first
};

/// Which kernel runs a Problem, how, and why no other. Holds no data pointer: one Plan serves any number of calls.
struct Plan {
    Problem problem;
    Pass pass = Pass::forward;
    const KernelInfo* kernel = nullptr;
    Tile tile{};
    int threads = 1;                  ///< workers that parallel_for may use at once
    std::size_t workspace_bytes = 0;  ///< the caller hands over this much, aligned to kWorkspaceAlignment
    std::vector<Refusal> refused;     ///< every other kernel, in order of preference
    std::string target;               ///< instruction set or device that the kernel will use: "AVX3", ...

    static constexpr std::size_t kWorkspaceAlignment = 64;

    /// Several lines for people: kernel, tile, threads, workspace, and the refused kernels with their reasons.
    std::string describe() const;
};

/// Chooses the first kernel of kernels() that takes the Problem and fits the options.
/// Throws Error(invalid_argument) for a Problem or option that breaks the contract, and Error(unsupported) or
/// Error(device_unavailable), with every reason, when the options leave no kernel.
Plan plan(const Problem& problem, const PlanOptions& options = {});

}  // namespace tessera
