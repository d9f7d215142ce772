// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "plot/figure.hpp"

namespace tessera::plot {

enum class Home : bool {
    file,  ///< a standalone SVG file with its own colours, light or dark by the reader's system setting
    page,  ///< inside an HTML page that has css_rules() and sets css_variables()
};

/// Returns the drawing as SVG, without scripts, external references, or ids that could clash with another drawing of
/// the page. Throws Error(invalid_argument) naming the axis for data that do not fit it.
std::string svg(const Figure& figure, Home home = Home::file);

/// Returns all panels as one SVG file. Throws Error(invalid_argument) if there is no panel or no column.
std::string svg(const Panels& panels);

}  // namespace tessera::plot
