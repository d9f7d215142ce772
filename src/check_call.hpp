// SPDX-License-Identifier: Apache-2.0
//
// The checks of forward() alone, for the C ABI's tessera_check_forward().
#pragma once

#include "tessera/attention.hpp"

namespace tessera {

/// Makes all checks of forward() except those of the workspace, and throws their errors. No kernel runs.
void check_forward(const Plan& plan, const ForwardArgs& args);

}  // namespace tessera
