// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/paths.hpp"

namespace tessera::cpu::fa2::simd_path {

/// Does few_gradients() take the sequences of up to kFewQueries queries of this plan? Those of a call with a matrix
/// unit for AVX512-BF16 are taken, too; AMX keeps its own.
bool takes_few_gradients(const Plan& plan);
/// Does it take all sequences that the Problem allows?
bool takes_only_few_gradients(const Plan& plan);
std::size_t few_gradients_workspace(const Plan& plan);

/// Computes the gradients of all sequences of up to kFewQueries queries and leaves those of others as they are. The
/// bits are those of backward() on the SIMD path.
void few_gradients(const BackwardCall& call);

}  // namespace tessera::cpu::fa2::simd_path
