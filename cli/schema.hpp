// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "session.hpp"

namespace tessera::cli {

/// Returns the document with "schema": "tessera.COMMAND/1" (or "tessera.COMMAND.VARIANT/1") as its first field; of a
/// list, each object with it. A document that has a schema keeps it.
Json with_schema(const Json& document, const std::string& command, const std::string& variant);

}  // namespace tessera::cli
