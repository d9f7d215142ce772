// SPDX-License-Identifier: Apache-2.0
//
// One backward pass: the arguments of its kernels, and the kernels that run before and after the main kernel of the
// schedule.
#pragma once

#include "cuda/gradient/launch.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda::gradient {

/// Row data (RowTile), with delta from a sum of P dP. instances/ has one instance of each function.
template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream);

/// Row data, with delta from O and its residual.
template <class T>
cudaError_t start_delta_from_output(const Launch& launch, cudaStream_t stream);

/// Arguments of list_kernel.
struct ListLaunch {
    Launch call;
    int block_kv;
};
/// Lists the key blocks of a ragged call (cuda/host/work_list.hpp).
cudaError_t start_list(const ListLaunch& launch, cudaStream_t stream);

/// fp16: scales of dS from bounds of |dS|.
template <class T>
cudaError_t start_fp16_scale(const Launch& launch, cudaStream_t stream);

/// dK and dV from the partial sums of split groups.
template <class T>
cudaError_t start_dkdv_reduce(const DkdvReduceLaunch& launch, cudaStream_t stream);

/// dQ from its accumulators in the workspace.
template <class T, int kHeadDim>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream);

/// The gradient of the bias.
template <class T, class Shape>
cudaError_t start_bias(const Launch& launch, cudaStream_t stream);

/// The gradient of the sinks, from the rows' delta.
cudaError_t start_sink_gradient(const Launch& launch, cudaStream_t stream);

/// The fp32 forms.
cudaError_t start_delta_from_output_fp32(const Launch& launch, cudaStream_t stream);
template <class Shape>
cudaError_t start_delta_fp32(const Launch& launch, cudaStream_t stream);
template <int kHeadDim>
cudaError_t start_dq_fp32(const Launch& launch, cudaStream_t stream);
template <class Shape>
cudaError_t start_bias_fp32(const Launch& launch, cudaStream_t stream);

/// The properties of a compiled shape of the main kernel that the host needs.
struct Extents {
    int head_dim;
    int block_kv;
    int shared_bytes;
    bool general;               ///< as in Config
    bool splits_heads = false;  ///< a group's query heads may be split over CTAs (HeadSplit)
    bool takes_blocks = false;  ///< a CTA takes one key block (take_key_block)
};

/// True if delta comes from O and its residual when the residual is given. In fp32 O has no residual. With dropout, dS
/// of a row that sees one key is 0 only if delta is the sum of P dP.
bool uses_o_residual(const Problem& problem);

std::size_t workspace_bytes(const Problem& problem, const Extents& extents);

/// Starts all kernels of a call. `start` starts the main kernel, which is called `name` in messages. Throws
/// Error(internal) when CUDA refuses a launch.
void run(const BackwardCall& call, const Extents& extents,
         cudaError_t (*start)(const Problem&, const Launch&, cudaStream_t), const char* name);

}  // namespace tessera::cuda::gradient
