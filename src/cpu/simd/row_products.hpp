// SPDX-License-Identifier: Apache-2.0
//
// Products of a matrix with a few rows, as in a decode step: reading the matrix is the limit.
#pragma once

#include <cstdint>

#include "tessera/dtype.hpp"

namespace tessera::cpu::simd {

/// A matrix of `outputs` rows with contiguous elements, fp32 or bf16.
struct MatrixRows {
    const void* data = nullptr;
    std::int64_t stride = 0;  ///< elements from row to row
    DType dtype = DType::fp32;
};

inline constexpr std::int64_t kProductRows = 8;      ///< of x at a time
inline constexpr std::int64_t kProductOutputs = 16;  ///< rows of the matrix at a time

/// y[o, r] = sum over i of w[first + o, i] * x[r, i] in fp32, for outputs <= kProductOutputs and rows <= kProductRows.
/// x: [rows, inputs], y: [kProductOutputs, kProductRows]. A lane of a vector adds every n-th product in ascending order
/// with fused multiply-adds, then the lanes are added: the order depends on `inputs` and the instruction set alone, so
/// an element has the same bits beside any other rows and outputs.
void row_products(const MatrixRows& w, std::int64_t first, std::int64_t outputs, const float* x, std::int64_t rows,
                  std::int64_t inputs, float* y);

}  // namespace tessera::cpu::simd
