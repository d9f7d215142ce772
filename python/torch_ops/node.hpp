// SPDX-License-Identifier: Apache-2.0
//
// A forward and a backward behind a node of autograd that PyTorch has for an attention operator of its own: the one way
// to a gradient that autograd knows without Python, since the stable ABI has no words for those. cpu.cc and cuda.cc
// each give kernels to an operator that PyTorch has no kernel of there and never calls there
// (docs/decisions/torch-autograd-node.md).
#pragma once

#include <optional>
#include <tuple>

#include "results.hpp"

namespace tessera::torch_ops {

/// O, and what the backward wants of the forward: LSE, or one run of bytes with LSE and the residual of O. `code`:
/// python/tessera/torch/_node.py packs the settings into one number, which stands where PyTorch has dropout_p: it
/// takes longer for each argument more. No probability is as large, so that who calls the operator as PyTorch
/// describes it is refused. Throws Error.
std::tuple<Tensor, Tensor> node_forward(const Inputs& in, double code, std::optional<double> scale);

/// Gradients of q, k and v; undefined where d_o is. Throws Error.
std::tuple<Tensor, Tensor, Tensor> node_backward(const Tensor& d_o, const Inputs& in, TensorRef o, TensorRef kept,
                                                 double code, std::optional<double> scale);

/// Throws Error: these arguments have to have their defaults.
[[noreturn]] inline void refuse_other_settings() {
    invalid("dropout_p", "expected no other settings beside tessera's");
}

}  // namespace tessera::torch_ops
