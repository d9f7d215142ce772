// SPDX-License-Identifier: Apache-2.0
//
// A backend gives the registry an ordered list of these rows, and nothing else.
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
    ParallelFor parallel_for;  ///< of a CPU kernel, never empty; of a CUDA kernel, empty
    TileCounters* counters;    ///< may be null
    void* stream;              ///< cudaStream_t of a CUDA kernel; null: the default stream
    TileObserver* observer;    ///< may be null
    bool skip_memory_check;    ///< as in Execution
};
using ForwardCall = Call<ForwardArgs>;
using BackwardCall = Call<BackwardArgs>;

/// A legal tensor that a kernel can't work on, and why: "expected a last stride of 1, got 3".
struct TensorRefusal {
    const char* tensor;
    std::string reason;
};

struct Kernel {
    KernelInfo info;
    /// Why this kernel can't run the Problem on this device (with this tile, when the caller names one); empty when it
    /// can. dtype, pass, and that the device is one of the kernel's backend and there, are checked by plan() before.
    std::optional<std::string> (*refuse)(const Problem& problem, const std::optional<Tile>& tile, const Device& device);
    /// The tile that runs when the caller names none. It depends on head_dim, dtype, the features of the scores and the
    /// target, and on lengths and mask only where no bit of a result depends on it (docs/numerics.md).
    Tile (*default_tile)(const Problem& problem);
    /// For a Plan whose problem, pass, device, tile and threads are set.
    std::size_t (*workspace_bytes)(const Plan& plan);
    std::string (*target)(const Device& device);
    /// Plan::matrix_unit for such a Plan. Null: no kernel of this row uses one.
    std::string (*matrix_unit)(const Plan& plan) = nullptr;
    void (*forward)(const ForwardCall& call);    ///< null for a backward kernel
    void (*backward)(const BackwardCall& call);  ///< null for a forward kernel
    /// The first tensor whose strides or alignment this forward kernel can't work on, or nothing. The tensors are
    /// validated before. Null: the kernel takes all.
    std::optional<TensorRefusal> (*refuse_tensors)(const Problem& problem, const ForwardArgs& args) = nullptr;
    /// refuse_tensors of a backward kernel.
    std::optional<TensorRefusal> (*refuse_backward_tensors)(const Problem& problem, const BackwardArgs& args) = nullptr;
    /// Plan::o_residual, for Problems in 16 bits that this kernel takes. Null: never.
    bool (*uses_o_residual)(const Problem& problem) = nullptr;
    /// The names of the compiled variants of tile, padded head_dim and features, between which the kernel chooses by
    /// the Problem alone. Tests count that each one runs. Most kernels have one.
    std::vector<std::string> shapes = {"one"};
    /// Which of `shapes` runs a Problem that refuse() takes.
    std::size_t (*shape_of)(const Problem& problem) = [](const Problem&) { return std::size_t{0}; };

    const std::string& shape_name(const Problem& problem) const { return shapes.at(shape_of(problem)); }
};

/// Plan::o_residual.
inline bool knows_o_residual(const Kernel& kernel, const Problem& problem) {
    return is_16_bit(problem.dtype) && kernel.uses_o_residual != nullptr && kernel.uses_o_residual(problem);
}

}  // namespace tessera
