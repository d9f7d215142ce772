// SPDX-License-Identifier: Apache-2.0
//
// From a call to what its kernels are launched with; what runs before the kernel of a schedule, and after it.
#pragma once

#include "cuda/gradient/launch.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda::gradient {

/// Delta and the LSE as other kernels want it. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream);

/// Delta from O and the rest of it.
template <class T>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream);

/// The powers of two that dS of a head is held times, in fp16; before it, limits.
template <class T>
cudaError_t start_units(const Launch& launch, cudaStream_t stream);

/// dK and dV of groups that were shared out.
template <class T>
cudaError_t start_sum_shares(const SumSharesLaunch& launch, cudaStream_t stream);

/// dQ out of the workspace.
template <class T, int kHeadDim>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream);

/// The gradient of the bias.
template <class T, class Shape>
cudaError_t start_bias(const Launch& launch, cudaStream_t stream);

/// The same in fp32.
template <class Shape>
cudaError_t start_delta_fp32(const Launch& launch, cudaStream_t stream);
template <int kHeadDim>
cudaError_t start_dq_fp32(const Launch& launch, cudaStream_t stream);
template <class Shape>
cudaError_t start_bias_fp32(const Launch& launch, cudaStream_t stream);

/// What the host knows of a compiled shape of the kernel of a schedule.
struct Extents {
    int head_dim;
    int block_kv;
    int shared_bytes;
    bool general;         ///< as in Config
    bool shares = false;  ///< a group's query heads may be shared out
};

/// Is delta made of O and its rest, where that is given? In fp32 O has no rest; and with dropout a row that sees one
/// key has dS = 0 only by the sum.
bool uses_o_residual(const Problem& problem);

std::size_t workspace_bytes(const Problem& problem, const Extents& extents);

/// All kernels of a call; `start`: that of the schedule, called `name`. Throws Error(internal) when CUDA refuses a
/// launch.
void run(const BackwardCall& call, const Extents& extents,
         cudaError_t (*start)(const Problem&, const Launch&, cudaStream_t), const char* name);

}  // namespace tessera::cuda::gradient
