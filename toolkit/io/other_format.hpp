// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "io/file.hpp"

namespace tessera::io {

/// A format that no reader of tensors reads.
struct OtherFormat {
    std::string what;  ///< "a zip archive of torch.save (.pt, .pth, .bin)"; empty: unknown
    std::string cure;  ///< how to get tensors from it
};

/// Identifies a file that a reader cannot read, by its first bytes and never by its name. A reader calls it after its
/// own check failed, so that a valid file is never refused because its first bytes look like another format.
OtherFormat other_format(const ByteSource& source);

/// Returns "expected WANTED, it is WHAT: CURE", or `otherwise` for an unknown format.
std::string not_wanted_text(const ByteSource& source, const std::string& wanted, const std::string& otherwise);

/// Returns the sentence about a folder given as a file: the files in it that tessera reads, if it has some.
std::string folder_text(const std::string& path);

}  // namespace tessera::io
