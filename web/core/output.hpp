// SPDX-License-Identifier: Apache-2.0
//
// What the command prints is kept here, since the page has no standard output.
#pragma once

#include <string>

namespace tessera::web {

struct Output {
    std::string text;    ///< of Session::print()
    std::string errors;  ///< of print_error() and print_note(), a line each
};

/// Of the answer that is being made.
Output& output();

}  // namespace tessera::web
