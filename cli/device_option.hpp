// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "model/machine.hpp"

namespace tessera::cli {

/// Returns the machine of --device: a built-in name or a machine file. Throws UsageError with all names if it is
/// neither, and the errors of read_machine().
model::Machine machine_of_option(const std::string& text);

/// Returns the names, such as "v100, t4, ...".
std::string machine_names();

}  // namespace tessera::cli
