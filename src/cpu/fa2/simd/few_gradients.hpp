// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/paths.hpp"

namespace tessera::cpu::fa2::simd_path {

/// Does few_gradients() take the plan's sequences of few rows: up to kFewQueries queries per head, kMostFewRows per kv
/// head? Scores may only be scaled, by at most 1 in absolute value. On AMX, bf16 and fp32 keep the AMX kernels.
bool takes_few_gradients(const Plan& plan);
/// Does it take all sequences that the Problem allows?
bool takes_only_few_gradients(const Plan& plan);
std::size_t few_gradients_workspace(const Plan& plan);

/// Computes the gradients of all sequences of few rows and leaves those of others as they are. The
/// bits are those of backward() on the SIMD path.
void few_gradients(const BackwardCall& call);

}  // namespace tessera::cpu::fa2::simd_path
