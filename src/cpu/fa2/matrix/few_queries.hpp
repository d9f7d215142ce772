// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/matrix/run.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// Runs the forward of a call with few_queries(). The bits are those of forward().
void forward_few_queries(const ForwardRun& run);

}  // namespace tessera::cpu::fa2::matrix_path
