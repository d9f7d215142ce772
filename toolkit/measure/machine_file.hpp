// SPDX-License-Identifier: Apache-2.0
//
// Machines as files, which `tessera calibrate` writes and --device reads.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "model/machine.hpp"

namespace tessera::measure {

/// Returns {"schema": "tessera.machine/1", "name": ..., "title": ..., "kind": "gpu", "cores": {"value": 132, "unit":
/// "", "source": "..."}, ...}.
nlohmann::ordered_json to_json(const model::Machine& machine);

/// Reads strictly: every quantity must be present with a number and a source, and nothing else may be; "schema" may be
/// missing. Throws
/// Error(bad_data) that names the field, what was expected and what came.
model::Machine machine_from_json(const nlohmann::ordered_json& json);

/// Reads a machine file: all quantities, or the name of a built-in machine as a JSON string ("xeon-16"). Throws
/// Error(cannot_open), or Error(bad_data) that names the file and the field.
model::Machine read_machine(const std::string& path);

/// Returns the machine in X.machine.json, on which the Records in X.jsonl were measured; empty without such a file.
std::optional<model::Machine> machine_beside(const std::string& records);

/// Writes the machine atomically: on failure the old file stays. Throws Error(cannot_write).
void write_machine(const std::string& path, const model::Machine& machine);

}  // namespace tessera::measure
