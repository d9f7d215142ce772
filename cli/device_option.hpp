// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "model/machine.hpp"

namespace tessera::cli {

/// The machine of --device: a name that the model knows, or a machine file. If it is neither, throws UsageError with
/// all names. Throws as read_machine() does.
model::Machine machine_of_option(const std::string& text);

/// The known names: "v100, t4, ...".
std::string machine_names();

}  // namespace tessera::cli
