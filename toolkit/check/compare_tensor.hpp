// SPDX-License-Identifier: Apache-2.0
//
// Compares one tensor with its gold by the rules that compare.hpp states.
#pragma once

#include "check/compare.hpp"
#include "check/gold.hpp"

namespace tessera::check {

/// The set of rules that a tensor falls under.
enum class Role { output, lse, gradient };

/// `dtype` is the Problem's and decides the rules. The dtype of `got` (fp32 for lse and some bias gradients) decides
/// the error that the last rounding may make.
TensorReport compare_tensor(const TensorGold& gold, const TensorView& got, DType dtype, Role role);

}  // namespace tessera::check
