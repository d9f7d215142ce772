// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// The content of the header of a .npy file, unchecked.
struct NpyHeader {
    std::string descr;
    bool fortran_order = false;
    std::vector<std::int64_t> shape;
};

/// Parses the text of a header: a Python dict literal, then spaces and newlines. The keys are exactly descr (a string),
/// fortran_order (True or False) and shape (a tuple of integers in [0, 2^63), rank <= kMaxFileRank, each perhaps with
/// the L of Python 2), once each, in any order. It evaluates nothing and never recurses. Throws Error(bad_data).
NpyHeader parse_npy_header(std::string_view text, const std::string& origin);

}  // namespace tessera::io
