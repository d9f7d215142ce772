// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

namespace tessera {

/// Is this `scripts/test.sh --long`, where there is time for ten times the random cases?
inline bool long_run() { return std::getenv("TESSERA_LONG") != nullptr; }

}  // namespace tessera
