// SPDX-License-Identifier: Apache-2.0
//
// Everything that can be wrong with the tensors of a call, found before a byte is written.
#pragma once

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// Throw Error(invalid_argument) naming the tensor, what was expected and what came. Every tensor must be on `device`.
/// Values on a CUDA device are not read, so only the shape of cu_seqlens is checked there. No tensor may share memory
/// with the workspace.
void check_tensors(const Problem& problem, const ForwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace = {});
void check_tensors(const Problem& problem, const BackwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace = {});

/// Throws Error(invalid_argument) unless the tensor has this shape, one of these dtypes, and memory that a tensor can
/// have.
void expect_tensor(const char* name, const TensorView& tensor, std::span<const std::int64_t> shape,
                   std::span<const DType> dtypes);

/// Returns true if two views share a byte. The result is also true for unusual strides whose exact test would take
/// longer than a call should, so a rare pair of interleaved views is refused although it shares nothing.
bool may_overlap(const TensorView& a, const TensorView& b);

/// True when a view and a stretch of memory share a byte; as sure as may_overlap().
bool may_touch(const TensorView& view, std::span<const std::byte> memory);

/// True when two different indices of the view are the same element (stride 0, or strides that fold back).
bool overlaps_itself(const TensorView& view);

}  // namespace tessera
