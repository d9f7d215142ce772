// SPDX-License-Identifier: Apache-2.0
//
// From a validated call to the parameters of its kernel.
#pragma once

#include <optional>
#include <string>

#include "cuda/host/kernel_table.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/tile/cache.hpp"
#include "cuda/tile/params.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda {

/// A [batch, len, heads, dim] or varlen [total, heads, dim] tensor; null when it is not given.
Rows rows_of(const TensorView& tensor);

/// Can rows of `dim` 16-bit elements be read and written 16 bytes at a time?
bool takes_vectors(const Rows& rows, int dim);

/// Can rows of `dim` bytes be read and written 8 bytes at a time?
bool takes_byte_vectors(const Rows& rows, int dim);
/// Can a bias or its gradient be read or written two neighbouring keys at a time? They then are 32 aligned bits of
/// every row.
bool takes_bias_pairs(const Bias& bias, int len_kv);
bool takes_bias_pairs(const BiasGradient& dbias, int len_kv);

/// The number of heads, of all sequences or of a varlen call, that alternate in the tile order. Causal tiles differ in
/// length, so the longest of several heads go first: as many heads as have K and V in `l2_share` bytes of the L2.
/// Without a diagonal, one head follows the other. Results don't depend on it.
int heads_together(const Problem& problem, std::int64_t l2_share);

/// The cache of a forward's keys; without lengths if it has none.
Cache cache_of(const Problem& problem, const ForwardArgs& args);

/// Parameters of a forward. Checks that every tensor and the workspace are memory of the plan's device, and throws
/// Error(invalid_argument) naming the first that is not.
ForwardParams forward_params(const ForwardCall& call);

/// Parameters of a backward, with the same checks. Gradients that are not given are null.
BackwardParams backward_params(const BackwardCall& call);

}  // namespace tessera::cuda
