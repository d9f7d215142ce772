// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "walk/by_hand.hpp"

namespace tessera::cli {

/// Returns the example of `numbers` ("q 1 0, 0 1; k 1 1, 0 2; v 4 0, 0 4; do 1 0, 0 1"), cut by `tile` ("2,2"). Without
/// "do", dO is (1, 0) everywhere. An empty text selects the built-in values. `backward`: dO is used. Throws UsageError
/// naming the option.
walk::HandExample hand_example(const std::string& numbers_option, const std::string& numbers,
                               const std::string& tile_option, const std::string& tile, bool backward);

}  // namespace tessera::cli
