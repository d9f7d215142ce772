// SPDX-License-Identifier: Apache-2.0
//
// The error of an argument that a call can't take.
#pragma once

#include <string>

#include "tessera/error.hpp"

namespace tessera {

/// `argument`: its name, or that of a field, as the caller wrote it. `message`: what was expected and what came.
[[noreturn]] inline void invalid(const std::string& argument, const std::string& message) {
    throw Error(ErrorCode::invalid_argument, argument, message);
}

}  // namespace tessera
