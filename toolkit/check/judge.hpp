// SPDX-License-Identifier: Apache-2.0
//
// One tensor against its gold, by the rules that compare.hpp states.
#pragma once

#include "check/compare.hpp"
#include "check/gold.hpp"

namespace tessera::check {

/// Which rules a tensor falls under.
enum class Role { output, lse, gradient };

/// `dtype` is the Problem's: it decides the rules. The dtype of `got` (fp32 for lse and some bias gradients) decides
/// what the last rounding may cost.
TensorReport judge(const TensorGold& gold, const TensorView& got, DType dtype, Role role);

}  // namespace tessera::check
