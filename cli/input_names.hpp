// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "io/tensor_file.hpp"

namespace tessera::cli {

/// Says how to name q, k and v of a file in which they have other names, or that the file holds the weights of a model.
/// `names` are those that options gave. Returns "; name the tensors by --q query --k key --v NAME", or an empty text if
/// the file has all three.
std::string naming_text(const io::TensorFile& file, const std::map<std::string, std::string>& names);

}  // namespace tessera::cli
