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
/// Returns the names of the GPUs among them.
std::string gpu_names();
/// Returns ", perhaps h100" for a mistyped name; empty: none is near.
std::string perhaps_machine(const std::string& text);

}  // namespace tessera::cli
