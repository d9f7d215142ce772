// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace tessera::plot {

/// True if this build was made with librsvg.
bool can_draw_png();

/// Renders an SVG drawing in light colours as the bytes of a PNG file, with `scale` pixels to each of the drawing's
/// own. Throws Error(unsupported) if can_draw_png() is false. Throws Error(invalid_argument) if librsvg cannot read the
/// text as SVG, or it has no size.
std::string png(std::string_view svg, double scale = 2);

}  // namespace tessera::plot
