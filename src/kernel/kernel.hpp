// SPDX-License-Identifier: Apache-2.0
//
// The row that a backend gives the registry for each kernel: its refusals, default tile, workspace and entry points.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/kernel.hpp"
#include "tessera/plan.hpp"

namespace tessera {

/// A validated call, ready to run.
template <class Args>
struct Call {
    const Plan& plan;
    Args args;  ///< only_given(): a tensor that was not given has a null pointer
    std::span<std::byte> workspace;
    ParallelFor parallel_for;  ///< CPU kernels: never empty; CUDA kernels: empty
    TileCounters* counters;    ///< may be null
    void* stream;              ///< cudaStream_t of a CUDA kernel; null: the default stream
    TileObserver* observer;    ///< may be null
    bool skip_memory_check;    ///< as in Execution
};
using ForwardCall = Call<ForwardArgs>;
using BackwardCall = Call<BackwardArgs>;

/// A legal tensor that a kernel can't process, and the reason: "expected a last stride of 1, got 3".
struct TensorRefusal {
    const char* tensor;
    std::string reason;
};

struct Kernel {
    KernelInfo info;
    /// The reason why this kernel can't run the Problem on this device (and with this tile, if the caller names one);
    /// empty if it can. plan() has checked dtype and pass, and that the device exists and belongs to the kernel's
    /// backend.
    std::optional<std::string> (*refuse)(const Problem& problem, const std::optional<Tile>& tile, const Device& device);
    /// The tile if the caller names none. It depends on head_dim, dtype, the score features, the target, and the
    /// shared memory of the device. It depends on lengths and mask only if that changes no bit of a result
    /// (docs/numerics.md).
    Tile (*default_tile)(const Problem& problem, const Device& device);
    /// Workspace of a Plan whose problem, pass, device, tile and threads are set.
    std::size_t (*workspace_bytes)(const Plan& plan);
    std::string (*target)(const Device& device);
    /// Plan::matrix_unit for such a Plan. Null: no kernel of this row uses one.
    std::string (*matrix_unit)(const Plan& plan) = nullptr;
    void (*forward)(const ForwardCall& call);    ///< null for a backward kernel
    void (*backward)(const BackwardCall& call);  ///< null for a forward kernel
    /// The first tensor whose strides or alignment this forward kernel can't process, or nothing. The tensors are
    /// valid. Null: the kernel takes all.
    std::optional<TensorRefusal> (*refuse_tensors)(const Problem& problem, const ForwardArgs& args) = nullptr;
    /// refuse_tensors of a backward kernel.
    std::optional<TensorRefusal> (*refuse_backward_tensors)(const Problem& problem, const BackwardArgs& args) = nullptr;
    /// Plan::o_residual for 16-bit Problems that this kernel takes. Null: always false.
    bool (*uses_o_residual)(const Problem& problem) = nullptr;
    /// The names of the compiled variants (padded head_dim, features). The Problem alone selects one. Tests check that
    /// each one runs. Most kernels have one.
    std::vector<std::string> shapes = {"one"};
    /// The index in `shapes` of the variant that runs a Problem that refuse() accepts.
    std::size_t (*shape_of)(const Problem& problem) = [](const Problem&) { return std::size_t{0}; };

    const std::string& shape_name(const Problem& problem) const { return shapes.at(shape_of(problem)); }
};

/// The value of Plan::o_residual for this kernel.
inline bool knows_o_residual(const Kernel& kernel, const Problem& problem) {
    return is_16_bit(problem.dtype) && kernel.uses_o_residual != nullptr && kernel.uses_o_residual(problem);
}

}  // namespace tessera
