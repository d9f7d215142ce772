// SPDX-License-Identifier: Apache-2.0
//
// The parts of gpu_families().
#pragma once

#include "model/family.hpp"

namespace tessera::model {

/// Families of kernels that the project did not run, or that PyTorch runs without FlashAttention.
std::span<const Family> card_families();

}  // namespace tessera::model
