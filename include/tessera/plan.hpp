// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"
#include "tessera/tensor.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// The caller's wishes for the choice. plan() chooses everything that is left out.
struct PlanOptions {
    Pass pass = Pass::forward;
    std::optional<Backend> backend{};
    std::optional<Schedule> schedule{};
    std::string kernel{};        ///< exact name of a kernel; empty: any
    std::optional<Tile> tile{};  ///< default: the kernel's own for this head_dim and dtype
    int threads = 0;             ///< 0: one per core that this process may use; 1..1024
    /// The device of the tensors. Default: CUDA device 0 when `backend` is cuda or `kernel` is a CUDA kernel, else host
    /// memory.
    std::optional<Device> device{};
};

/// A kernel that will not run, with the reason.
struct Refusal {
    const KernelInfo* kernel = nullptr;
    std::string reason;
    bool capable = false;  ///< true: it could run this Problem, but another kernel comes first
};

/// A Plan says which kernel runs a Problem, how, and why no other. It has no data pointer: one Plan serves any number
/// of calls.
struct Plan {
    Problem problem;
    Pass pass = Pass::forward;
    const KernelInfo* kernel = nullptr;
    Tile tile{};
    Device device{};                  ///< where the tensors and the workspace lie
    int threads = 1;                  ///< workers that parallel_for may use at once; no effect on a CUDA device
    std::size_t workspace_bytes = 0;  ///< size of the caller's workspace, which is aligned to kWorkspaceAlignment
    std::vector<Refusal> refused;     ///< every other kernel, in order of preference
    std::string target;  ///< instruction set or device that the kernel will use: "AVX3", "sm_90 (NVIDIA H200)"
    /// The unit that multiplies tiles of bf16 for a CPU kernel, "AMX" or "AVX512-BF16". Empty: the kernel uses the
    /// multiply-adds of `target`. A call with an observer runs without it.
    std::string matrix_unit{};
    /// Forward: the kernel can write o_residual. Backward: it computes delta from O and o_residual, which saves two of
    /// seven GEMMs.
    bool o_residual = false;

    static constexpr std::size_t kWorkspaceAlignment = 64;

    /// Several lines of text: kernel, tile, threads, workspace, and the refused kernels with their reasons.
    std::string describe() const;
};

/// Chooses the first kernel of kernels() that takes the Problem and fits the options.
/// Throws Error(invalid_argument) for a Problem or option that breaks the contract, Error(device_unavailable) when the
/// tensors are on a CUDA device that can't be used, and Error(unsupported), with every reason, when the options leave
/// no kernel. Without a CUDA device in the options the CUDA driver is not called.
Plan plan(const Problem& problem, const PlanOptions& options = {});

}  // namespace tessera
#pragma GCC visibility pop
