// SPDX-License-Identifier: Apache-2.0
//
// Loops that do one thing at the most that a core can: what the rates of kernels are compared with (measure/roofs.hpp).
#pragma once

#include <cstdint>

namespace tessera::cpu::tile {

/// Fused multiply-adds on independent registers, `rounds` times; returns the floating-point operations done.
double peak_multiply_adds(std::int64_t rounds);

/// Products of bf16 tiles that stay in the first-level cache; operations done, 0 where unit() is none.
double peak_tile_products(std::int64_t rounds);

/// exp of one tile in the first-level cache; elements done.
double peak_exponentials(std::int64_t rounds);

/// Sum of [count] floats, a multiple of 256 of them, read as fast as possible.
float peak_read(const float* from, std::int64_t count);

}  // namespace tessera::cpu::tile
