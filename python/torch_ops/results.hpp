// SPDX-License-Identifier: Apache-2.0
//
// Both passes from inputs to new tensors: what every operator and direct.cc do.
#pragma once

#include "call.hpp"

namespace tessera::torch_ops {

/// What a forward is to give beside O.
struct Wanted {
    bool lse = true;
    bool rest = false;
    bool together = false;  ///< LSE and the residual of O in one tensor of bytes, which Results has as lse
};

/// o: [batch, len_q, heads_q, head_dim_v], [batch, heads_q, len_q, head_dim_v] with heads_first | [total_q, heads_q,
/// head_dim_v]. lse: [batch, heads_q, len_q] | [heads_q, total_q], fp32 (fp64 for fp64 inputs), contiguous. o_residual,
/// the residual of O for the backward: int8 in the shape of o, or of no elements where the kernel doesn't write it.
struct Results {
    Tensor o;
    OptionalTensor lse, o_residual;
};

/// Throws Error.
Results run_forward(const Inputs& in, const Settings& settings, const Wanted& wanted);

/// In the shapes and dtypes of q, k, v and bias; dbias where it is asked for.
struct Gradients {
    Tensor dq, dk, dv;
    OptionalTensor dbias;
};

/// dlse and o_residual may be none; lse may be that of a forward with `together`. Throws Error.
Gradients run_backward(TensorRef d_o, TensorRef dlse, const Inputs& in, TensorRef o, TensorRef lse,
                       TensorRef o_residual, const Settings& settings, bool bias_gradient);

}  // namespace tessera::torch_ops
