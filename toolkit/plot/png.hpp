// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace tessera::plot {

/// Was this build made with librsvg?
bool can_draw_png();

/// An SVG drawing as the bytes of a PNG file, light colours, `scale` pixels to each of the drawing's own. Throws
/// Error(unsupported) when can_draw_png() is false, Error(invalid_argument) when the text is not SVG that librsvg reads
/// or has no size.
std::string png(std::string_view svg, double scale = 2);

}  // namespace tessera::plot
