// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/paths.hpp"

namespace tessera::cpu::fa2::simd_path {

/// Are the queries of this plan so few that reading K and V is most of the work?
bool decodes(const Plan& plan);
std::size_t decode_workspace(const Plan& plan);

/// Runs the forward of a call that decodes() accepts. The bits are those of forward().
void decode(const ForwardCall& call);

}  // namespace tessera::cpu::fa2::simd_path
