// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a case: shapes, layouts, and the values that are no random numbers.
#pragma once

#include <cstdint>

#include "check/case.hpp"
#include "check/guarded.hpp"

namespace tessera::check {

/// One number per tensor. This number and the case's seed decide its values and its layout.
enum Tensor : std::uint64_t {
    kQ,
    kK,
    kV,
    kBias,
    kSlopes,
    kCuQ,
    kCuKv,
    kO,
    kLse,
    kDo,
    kDlse,
    kDq,
    kDk,
    kDv,
    kDbias,
    kOResidual,
    kSinks,
    kDsinks,
    kTable,
    kLengths
};

std::uint64_t seed_of(const Case& c, Tensor tensor);
GuardedTensor rows_tensor(const Case& c, Tensor tensor, bool of_queries, std::int64_t dim, bool expand = false);
GuardedTensor residual_tensor(const Case& c);
GuardedTensor lse_tensor(const Case& c, Tensor tensor);
GuardedTensor bias_tensor(const Case& c, Tensor tensor, bool expand = false);
/// Turns entries of a filled bias into -inf.
void punch_holes(const TensorView& bias, BiasHoles holes, std::uint64_t seed);
GuardedTensor cu_seqlens(const Case& c, Tensor tensor, const std::vector<std::int64_t>& lengths);
GuardedTensor slopes_tensor(const Case& c);
GuardedTensor sinks_tensor(const Case& c, Tensor tensor);
/// Sinks that take nearly all of a row's weight, some of it, and none; the last is near the LSE of the cases large_lse.
void set_sinks_of_all_sizes(const TensorView& sinks);

}  // namespace tessera::check
