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

std::size_t workspace_bytes(const Problem& problem, int block_kv, int padded_dim);

Launch make_launch(const BackwardCall& call, int block_kv, int padded_dim);

/// Why one call counts too much, for `refuse`; empty when it does not.
std::optional<std::string> refuse_counts(const Problem& problem, int block_kv);

/// Throws Error(internal) when CUDA refuses a launch.
void start_before(const Problem& problem, const Launch& launch, cudaStream_t stream);
void start_after(const Problem& problem, const Launch& launch, int padded_dim, cudaStream_t stream);

}  // namespace tessera::cuda::gradient
