// SPDX-License-Identifier: Apache-2.0
//
// Files that a command is about to write: what stands there already must be of the same kind.
#pragma once

#include <string>

namespace tessera::cli {

enum class OutputKind { records, machine, svg, png, html, markdown, tensors };

/// Judges `path` before the work. Fine: nothing there, an empty file, what is no regular file (a pipe, /dev/stdout), or
/// an earlier output of this kind. Anything else is Error(cannot_write), so that a slip of the shell costs no data.
/// `path` may be empty: no such output was asked for.
void expect_own_output(const std::string& path, OutputKind kind);

}  // namespace tessera::cli
