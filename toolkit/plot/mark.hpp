// SPDX-License-Identifier: Apache-2.0
//
// How drawings say who made them, so that a program can tell them from other people's files.
#pragma once

#include <string_view>

namespace tessera::plot {

inline constexpr std::string_view kSvgMark = "<desc>drawn by tessera</desc>";
/// A text chunk: keyword, a zero byte, text.
inline constexpr std::string_view kPngMark{"Software\0tessera", 16};

}  // namespace tessera::plot
