// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "model/machine.hpp"

namespace tessera::cli {

/// The option of a machine; it has one meaning in every command that has it. `which` has it in the other order.
inline constexpr const char* kDeviceOption = "--device,--gpu";

/// Returns the machine of `option`: a built-in name or a machine file. Throws UsageError with all names if it is
/// neither, and the errors of read_machine(). A file that changes a built-in machine and keeps its name is called
/// NAME-edited, because error bars belong to the built-in one.
model::Machine machine_of_option(const std::string& text, const std::string& option = "--device");

/// Returns the names, such as "v100, t4, ...".
std::string machine_names();
/// Returns the names of the GPUs among them.
std::string gpu_names();
/// The dtype of a problem without --dtype: bf16 on GPUs, fp16 on GPUs that lack it, fp32 on CPUs. It is the same in
/// every command; kDefaultDtype describes it for --help.
std::string default_dtype(const model::Machine& machine);
inline constexpr const char* kDefaultDtype =
    "bf16 (default on GPUs that have it), fp16 (on others), fp32 (on CPUs), fp64";

/// Returns ", perhaps h100" for a mistyped name; empty: none is near.
std::string perhaps_machine(const std::string& text);

}  // namespace tessera::cli
