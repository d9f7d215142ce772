// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "plot/figure.hpp"

namespace tessera::plot {

enum class Home : bool {
    file,  ///< an SVG file of its own: brings its colours, light or dark as the reader's system is set
    page,  ///< inside an HTML page that has css_rules() and sets css_variables()
};

/// The drawing as SVG. No script, no reference to anything outside, no ids that could clash with another drawing of the
/// page. Throws Error(invalid_argument) naming the axis for data that don't fit it.
std::string svg(const Figure& figure, Home home = Home::file);

/// All panels as one SVG file. Throws Error(invalid_argument) where there is no panel, or no column.
std::string svg(const Panels& panels);

}  // namespace tessera::plot
