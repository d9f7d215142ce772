// SPDX-License-Identifier: Apache-2.0
//
// Collects the output of a command, because the page has no standard output.
#pragma once

#include <string>

namespace tessera::web {

struct Output {
    std::string text;    ///< from Session::print()
    std::string errors;  ///< from print_error() and print_note(), one per line
};

/// The output of the answer in progress.
Output& output();

}  // namespace tessera::web
