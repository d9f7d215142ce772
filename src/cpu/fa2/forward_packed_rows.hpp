// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/fa2/packed_run.hpp"

namespace tessera::cpu::fa2 {

/// The forward of a call whose queries_as_rows().
void forward_packed_rows(const ForwardRun& run);

}  // namespace tessera::cpu::fa2
