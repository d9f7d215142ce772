// SPDX-License-Identifier: Apache-2.0
#include "llama/json_file.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "io/file.hpp"
#include "tessera/error.hpp"

namespace llama {

nlohmann::json read_json_file(const std::string& path, std::uint64_t most_bytes) {
    const tessera::io::FileBytes bytes = tessera::io::read_file(path, most_bytes);
    const char* const text = reinterpret_cast<const char*>(bytes.data.get());
    try {
        return nlohmann::json::parse(text, text + bytes.size);
    } catch (const nlohmann::json::parse_error& error) {
        throw tessera::Error(tessera::ErrorCode::bad_data, path,
                             fmt::format("expected JSON, got an error at byte {}", error.byte));
    }
}

}  // namespace llama
