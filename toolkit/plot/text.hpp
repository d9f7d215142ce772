// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::plot {

/// Escapes text and attributes for XML and HTML. Control characters that XML forbids become U+FFFD.
std::string escaped(std::string_view text);

/// Estimates the width of UTF-8 text in a sans-serif face of that size, in pixels; the estimate errs on the high side.
double text_width(std::string_view text, double size);

/// Breaks `text` at spaces into lines of at most `width` pixels; a longer word stands alone.
std::vector<std::string> wrapped_to(std::string_view text, double size, double width);

}  // namespace tessera::plot
