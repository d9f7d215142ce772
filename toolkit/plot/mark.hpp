// SPDX-License-Identifier: Apache-2.0
//
// Marks that name the generator of a drawing, so that a program can recognise its own files.
#pragma once

#include <string_view>

namespace tessera::plot {

inline constexpr std::string_view kSvgMark = "<desc>drawn by tessera</desc>";
/// A text chunk: keyword, a zero byte, text.
inline constexpr std::string_view kPngMark{"Software\0tessera", 16};

}  // namespace tessera::plot
