// SPDX-License-Identifier: Apache-2.0
//
// Both passes, from input tensors to newly allocated results. Every operator of operators.cc calls these.
#pragma once

#include "call.hpp"

namespace tessera::torch_ops {

/// The results that a forward pass computes beside O.
struct Wanted {
    bool lse = true;
    bool residual = false;
};

/// o: [batch, len_q, heads_q, head_dim_v]; with heads_first [batch, heads_q, len_q, head_dim_v]; of a ragged batch
/// [total_q, heads_q, head_dim_v].
/// lse: [batch, heads_q, len_q] or [heads_q, total_q], fp32 (fp64 for fp64 inputs), contiguous.
/// o_residual: int8 in the shape of o, or [0] where the kernel does not write it.
struct Results {
    Tensor o;
    OptionalTensor lse, o_residual;
};

/// Throws Error.
Results run_forward(const Inputs& in, const Settings& settings, const Wanted& wanted);

/// Gradients in the shapes and dtypes of q, k, v, bias and sinks; dbias is set if it was asked for, dsinks with sinks.
struct Gradients {
    Tensor dq, dk, dv;
    OptionalTensor dbias, dsinks;
};

/// dlse and o_residual may be none. On CUDA a d_o with a stride of 0, as the gradient of a sum is, is copied: the
/// fastest kernels do not read it. Throws Error.
Gradients run_backward(const Tensor& d_o, TensorRef dlse, const Inputs& in, TensorRef o, TensorRef lse,
                       TensorRef o_residual, const Settings& settings, bool bias_gradient);

}  // namespace tessera::torch_ops
