// SPDX-License-Identifier: Apache-2.0
//
// From a validated call to what its kernel is told.
#pragma once

#include <optional>
#include <string>

#include "cuda/host/kernel_table.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/tile/params.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda {

/// A [batch, len, heads, dim] or ragged [total, heads, dim] tensor; null when it is not given.
Rows rows_of(const TensorView& tensor);

/// Can rows of `dim` 16-bit elements be read and written 16 bytes at a time?
bool takes_vectors(const Rows& rows, int dim);

/// Can rows of `dim` bytes be read and written 8 bytes at a time?
bool takes_byte_vectors(const Rows& rows, int dim);

/// (batch, head) pairs, or heads of a ragged call, whose tiles of queries are mixed in the order of the work. Causal
/// tiles are of different lengths: the longest of several heads come first, as long as the heads' K and V fit
/// `l2_share` bytes of the L2. Without a diagonal, heads come one after the other. It moves the order of the tiles and
/// no result.
int heads_together(const Problem& problem, std::int64_t l2_share);

/// Checks, too, that every tensor and the workspace are memory of the plan's device: throws Error(invalid_argument)
/// naming the first one that is not.
ForwardParams forward_params(const ForwardCall& call);

/// The same of a backward: gradients that are not given are null.
BackwardParams backward_params(const BackwardCall& call);

}  // namespace tessera::cuda
