// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/matrix/run.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// Runs the forward of a call with queries_as_rows().
void decode(const ForwardRun& run);

}  // namespace tessera::cpu::fa2::matrix_path
