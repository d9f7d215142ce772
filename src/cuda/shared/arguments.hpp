// SPDX-License-Identifier: Apache-2.0
//
// From a validated call to what its kernel is told.
#pragma once

#include <optional>
#include <string>

#include "cuda/tile/params.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda {

/// For a row's `refuse`: kernels count rows, heads and batch members in 32 bits. Empty when they fit.
std::optional<std::string> refuse_sizes(const Problem& problem);

/// A [batch, len, heads, dim] or ragged [total, heads, dim] tensor.
Rows rows_of(const TensorView& tensor);

/// Can rows of `dim` 16-bit elements be read and written 16 bytes at a time?
bool takes_vectors(const Rows& rows, int dim);

/// Checks, too, that every tensor and the workspace are memory of the plan's device: throws Error(invalid_argument)
/// naming the first one that is not.
ForwardParams forward_params(const ForwardCall& call);

}  // namespace tessera::cuda
