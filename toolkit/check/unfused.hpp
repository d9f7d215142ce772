// SPDX-License-Identifier: Apache-2.0
//
// The unfused computation in the same precision: attention as a framework without a fused kernel computes it, with
// every matrix in the dtype of the inputs. A bf16 or fp16 kernel has to be at least as accurate.
//
//     S = round(scale Q K^T);  softcap, ALiBi and bias unrounded;  P = round(softmax(S));  O = round(dropout(P) V)
//     dV = round(dropout(P)^T dO);  dP = round(dO V^T);  dS = round(P (dropout(dP) - rowsum(P dropout(dP)) + dLSE))
//     dQ = round(scale dS K);  dK = round(scale dS^T Q)
//
// `round` rounds to the dtype. Sums are kept in fp64, unlike the fp32 of hardware; the difference is far below one
// rounding.
#pragma once

#include "check/gold.hpp"

namespace tessera::check {

/// Fills in `unfused` of the golds. `dtype` is the Problem's: bf16 or fp16.
void add_unfused(const PackedCall<ForwardArgs>& packed, DType dtype, TensorGold& o);
void add_unfused(const PackedCall<BackwardArgs>& packed, DType dtype, const Gradients& gradients);

}  // namespace tessera::check
