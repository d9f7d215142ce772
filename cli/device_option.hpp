// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "model/machine.hpp"

namespace tessera::cli {

/// The machine of --device: one that the model knows by name, or a machine file. Throws UsageError with all names when
/// it is neither, and what read_machine() throws.
model::Machine machine_of_option(const std::string& text);

/// "v100, t4, ...": the names.
std::string machine_names();

}  // namespace tessera::cli
