// SPDX-License-Identifier: Apache-2.0
#include "device_option.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "measure/machine_file.hpp"
#include "parse.hpp"

namespace tessera::cli {

std::string machine_names() {
    std::string names;
    for (const model::Machine& machine : model::machines()) names += (names.empty() ? "" : ", ") + machine.name;
    return names;
}

model::Machine machine_of_option(const std::string& text) {
    if (const model::Machine* machine = model::find_machine(text)) return *machine;
    const bool names_a_file = text.find('/') != std::string::npos || text.find('.') != std::string::npos;
    std::error_code ignored;
    if (!names_a_file && !std::filesystem::exists(text, ignored))
        unexpected("--device", fmt::format("a machine file of tessera calibrate, or one of {}", machine_names()), text);
    return measure::read_machine(text);
}

}  // namespace tessera::cli
