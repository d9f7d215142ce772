// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera::cpu::matrix {

/// Runs GEMMs of bf16 tiles that stay in the L1 cache, `rounds` times: the matrix unit's peak on one core. Returns the
/// floating-point operations done, or 0 if there is no unit.
double peak_tile_products(std::int64_t rounds);

}  // namespace tessera::cpu::matrix
