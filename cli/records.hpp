// SPDX-License-Identifier: Apache-2.0
//
// Files of Records, read for a command.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/record.hpp"

namespace tessera::cli {

/// Returns the Records of all files in order. A note on stderr reports lines that were cut off and are left out.
std::vector<measure::Record> records_of(std::span<const std::string> paths);

}  // namespace tessera::cli
