// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera::cpu::matrix {

/// The matrix unit at the most that a core can: products of bf16 tiles that stay in the first-level cache, `rounds`
/// times. Returns the floating-point operations done, 0 where there is no such unit.
double peak_tile_products(std::int64_t rounds);

}  // namespace tessera::cpu::matrix
