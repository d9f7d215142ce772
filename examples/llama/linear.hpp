// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "llama/threads.hpp"
#include "llama/weights.hpp"

namespace llama {

/// y [rows, outputs] = x [rows, inputs] times the transposed matrix, in fp32. Each element is one dot product whose
/// additions have an order that depends on `inputs` alone: a row has the same bits with any other rows beside it.
void linear(const Matrix& matrix, const float* x, std::int64_t rows, float* y, Threads& threads);

}  // namespace llama
