// SPDX-License-Identifier: Apache-2.0
//
// Checks the output files of a command: an existing file must be an earlier output of the same kind.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::cli {

enum class OutputKind { records, machine, svg, png, html, markdown, tensors };

/// Checks `path` before the work starts. It accepts an empty or missing path, an empty file, an earlier output of this
/// kind, and a file that is not regular (a pipe, /dev/stdout). Any other file is Error(cannot_write), so that a slip in
/// the shell costs no data. "-" is a UsageError, because nobody means a file of that name.
void expect_own_output(const std::string& path, OutputKind kind);

/// Throws UsageError of `option` if the extension of `path` is none of `endings` (".svg"). A name without an extension
/// (/dev/stdout) passes.
void expect_ending(const char* option, const std::string& path, std::initializer_list<std::string_view> endings);

}  // namespace tessera::cli
