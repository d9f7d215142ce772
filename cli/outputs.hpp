// SPDX-License-Identifier: Apache-2.0
//
// Protects files that a command is about to write: an existing file must be of the same kind.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::cli {

enum class OutputKind { records, machine, svg, png, html, markdown, tensors };

/// Checks `path` before the work. It may be absent, an empty file, not a regular file (a pipe, /dev/stdout), or an
/// earlier output of this kind. Anything else is Error(cannot_write), so that a typing error costs no data. An empty
/// `path` means no output. "-" is a UsageError, because nobody wants a file of that name.
void expect_own_output(const std::string& path, OutputKind kind);

/// Throws UsageError of `option` if the name of `path` has another ending than `endings` (".svg"). A name without an
/// ending (/dev/stdout) passes.
void expect_ending(const char* option, const std::string& path, std::initializer_list<std::string_view> endings);

}  // namespace tessera::cli
