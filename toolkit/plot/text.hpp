// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::plot {

/// For text and attributes of XML and HTML. Control characters that XML forbids become U+FFFD.
std::string escaped(std::string_view text);

/// About how wide UTF-8 text is in a sans-serif face of that size, in pixels; a little more rather than less.
double text_width(std::string_view text, double size);

/// `text` broken at spaces into lines of at most `width` pixels; a longer word stands alone.
std::vector<std::string> wrapped_to(std::string_view text, double size, double width);

}  // namespace tessera::plot
