// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.hpp"

namespace tessera::io {

/// A dtype of the format.
struct SafetensorsDtype {
    std::string_view name;
    std::int64_t bits;           // bits of one element
    std::optional<DType> known;  // its counterpart in tessera
};

/// Returns the dtype of this name, or null if the format has none.
const SafetensorsDtype* find_dtype(std::string_view name);

/// Returns the format's name for a dtype of tessera.
std::string_view dtype_name(DType dtype);

/// One tensor as the header states it, not yet compared with the payload.
struct HeaderEntry {
    NamedTensor tensor;  // name, file_dtype and shape
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

struct Header {
    std::vector<HeaderEntry> entries;
    std::map<std::string, std::string> metadata;
};

/// Parses the JSON text of a header. Throws Error(bad_data) for anything outside the grammar of the format or `limits`.
Header parse_header(std::string_view text, const std::string& origin, const SafetensorsLimits& limits);

}  // namespace tessera::io
