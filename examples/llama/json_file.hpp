// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace llama {

/// The contents of a JSON file of at most so many bytes. Throws tessera::Error that names the file.
nlohmann::json read_json_file(const std::string& path, std::uint64_t most_bytes);

}  // namespace llama
