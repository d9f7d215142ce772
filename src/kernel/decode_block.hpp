// SPDX-License-Identifier: Apache-2.0
//
// The entry of a backend in the registry for decode_block(): the kernels of the chain and, if there is one, the one
// launch.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "kernel/kernel.hpp"
#include "tessera/decode_block.hpp"

namespace tessera {

/// A validated call, ready to run.
struct DecodeBlockCall {
    const DecodeBlockProblem& problem;
    const DecodeBlockArgs& args;   ///< residual is given; with a rotary embedding positions are given (or kv_lengths)
    Device device;                 ///< of all tensors; a CUDA kernel makes it the current device itself
    ParallelFor parallel_for;      ///< CPU: never empty; CUDA: empty
    int threads;                   ///< CPU
    void* stream;                  ///< CUDA
    bool early_weights;            ///< CUDA: DecodeBlockPlan::early_weights
    std::span<std::byte> scratch;  ///< scratch_bytes() of the workspace, for the kernels of the chain
};

/// The kernels of one backend. Tensors named qkv, o and lengths lie in the workspace and are packed.
struct DecodeBlockKernels {
    /// Why the kernels of the chain do not take this Problem on this device, or nothing. append() and the attention
    /// have refusals of their own.
    std::optional<std::string> (*refuse)(const DecodeBlockProblem& problem, const Device& device);
    /// The first tensor of a valid call whose strides or alignment the backend can't process, or nothing.
    std::optional<TensorRefusal> (*refuse_tensors)(const DecodeBlockProblem& problem, const DecodeBlockArgs& args);
    /// Throws Error(invalid_argument) naming a tensor that is not memory of the device. Null: nothing to check.
    void (*expect_memory)(const DecodeBlockArgs& args, std::span<std::byte> workspace, const Device& device) = nullptr;
    /// Bytes of scratch memory that the kernels of the chain need. Null: none.
    std::size_t (*scratch_bytes)(const DecodeBlockProblem& problem) = nullptr;
    /// First kernel of the chain: qkv [batch, qkv_rows()] of the Problem's dtype, rounded once after the bias. On CUDA
    /// it also writes lengths, int32 [batch]: kv_lengths + 1, or kv_lengths where that is the largest int32. On the CPU
    /// lengths are written beforehand.
    void (*norm_and_qkv)(const DecodeBlockCall& call, const TensorView& qkv, const TensorView& lengths);
    /// Last kernel of the chain: args.out from o [batch, heads_q, head_dim].
    void (*output)(const DecodeBlockCall& call, const TensorView& o);

    // The one launch. Null: the backend has none.
    /// Why it does not run a Problem that refuse() accepts, or nothing.
    std::optional<std::string> (*refuse_one_launch)(const DecodeBlockProblem& problem, const Device& device) = nullptr;
    /// DecodeBlockPlan::counter_bytes. They begin the workspace.
    std::size_t (*counter_bytes)(const DecodeBlockProblem& problem, const Device& device) = nullptr;
    /// Bytes of its workspace, counters included.
    std::size_t (*workspace_bytes)(const DecodeBlockProblem& problem, const Device& device) = nullptr;
    void (*one_launch)(const DecodeBlockCall& call, std::span<std::byte> workspace) = nullptr;
};

}  // namespace tessera
