// SPDX-License-Identifier: Apache-2.0
//
// Files that a command is about to write: what stands there already must be of the same kind.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::cli {

enum class OutputKind { records, machine, svg, png, html, markdown, tensors };

/// Judges `path` before the work. Fine: nothing there, an empty file, what is no regular file (a pipe, /dev/stdout), or
/// an earlier output of this kind. Anything else is Error(cannot_write), so that a slip of the shell costs no data.
/// `path` may be empty: no such output was asked for. "-" is a UsageError: nobody means a file of that name.
void expect_own_output(const std::string& path, OutputKind kind);

/// UsageError of `option` where the name of `path` says another format than one of `endings` (".svg"). A name without
/// an ending (/dev/stdout) says none.
void expect_ending(const char* option, const std::string& path, std::initializer_list<std::string_view> endings);

}  // namespace tessera::cli
