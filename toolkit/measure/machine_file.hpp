// SPDX-License-Identifier: Apache-2.0
//
// Machines as files: what `tessera calibrate` writes and --device takes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "model/machine.hpp"

namespace tessera::measure {

/// {"name": ..., "title": ..., "kind": "gpu", "cores": {"value": 132, "unit": "", "source": "..."}, ...}
nlohmann::ordered_json to_json(const model::Machine& machine);

/// Reads strictly: every quantity must be there with a number and a source, and nothing else may be. Throws
/// Error(bad_data) naming the field, what was expected and what came.
model::Machine machine_from_json(const nlohmann::ordered_json& json);

/// The machine in a file: all its quantities, or the name of a machine that the model knows ("xeon-16", a JSON string).
/// Throws Error(cannot_open), or Error(bad_data) naming the file and the field.
model::Machine read_machine(const std::string& path);

/// The machine in X.machine.json that a file of Records, X.jsonl, was measured on; nothing when there is no such file.
std::optional<model::Machine> machine_beside(const std::string& records);

/// Writes it, or leaves what was there. Throws Error(cannot_write).
void write_machine(const std::string& path, const model::Machine& machine);

}  // namespace tessera::measure
