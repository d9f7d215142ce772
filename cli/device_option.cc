// SPDX-License-Identifier: Apache-2.0
#include "device_option.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "measure/machine_file.hpp"
#include "parse.hpp"

namespace tessera::cli {

static bool is_number(const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789,") == std::string::npos;
}

std::string machine_names() {
    std::string names;
    for (const model::Machine& machine : model::machines()) names += (names.empty() ? "" : ", ") + machine.name;
    return names;
}

std::string gpu_names() {
    std::string names;
    for (const model::Machine& machine : model::machines()) {
        if (machine.kind == model::MachineKind::gpu) names += (names.empty() ? "" : ", ") + machine.name;
    }
    return names;
}

std::string default_dtype(const model::Machine& machine) {
    if (machine.kind == model::MachineKind::cpu) return "fp32";
    return machine.supports(DType::bf16) ? "bf16" : "fp16";
}

std::string perhaps_machine(const std::string& text) {
    std::vector<std::string> names;
    for (const model::Machine& machine : model::machines()) names.push_back(machine.name);
    const std::string nearest = nearest_of(text, names);
    return nearest.empty() ? "" : ", perhaps " + nearest;
}

model::Machine machine_of_option(const std::string& text, const std::string& option) {
    if (const model::Machine* machine = model::find_machine(usual_name(text))) return *machine;
    const bool names_a_file = text.find('/') != std::string::npos || text.find('.') != std::string::npos;
    std::error_code ignored;
    if (!names_a_file && !std::filesystem::exists(text, ignored))
        throw UsageError(option,
                         fmt::format("expected a machine file of tessera calibrate, or one of {}, got \"{}\"{}; "
                                     "tessera machine describes them, and writes one as a file to edit{}",
                                     machine_names(), text, perhaps_machine(text),
                                     is_number(text) ? " (--gpus takes a number of GPUs)" : ""));
    model::Machine machine = measure::read_machine(text);
    const model::Machine* known = model::find_machine(machine.name);
    if (known != nullptr && measure::to_json(*known) != measure::to_json(machine)) machine.name += "-edited";
    return machine;
}

}  // namespace tessera::cli
