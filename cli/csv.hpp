// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "session.hpp"

namespace tessera::cli {

/// Formats a list of objects as comma-separated values (RFC 4180): a line of names, then a line for each object. An
/// object in an object becomes columns "outer.inner", and a list one text with spaces. A row without a value has an
/// empty cell.
std::string csv_text(const Json& rows);

}  // namespace tessera::cli
