// SPDX-License-Identifier: Apache-2.0
//
// Colours and fonts of plots. Every colour of a drawing is a class whose rule reads a CSS variable, so that a page
// switches all its plots between light and dark through the variables. Presentation attributes hold the light colours
// for programs without CSS variables.
#pragma once

#include <string>

namespace tessera::plot {

/// Colours for series. People with any of the common colour-vision deficiencies can distinguish them, and they are dark
/// (light) enough for text on a light (dark) page. They follow Okabe and Ito, "Color Universal Design" (2008), adjusted
/// for contrast.
inline constexpr int kColors = 7;

enum class Theme : bool { light, dark };

struct Palette {
    const char* surface;  ///< behind the plot
    const char* ink;      ///< titles
    const char* quiet;    ///< ticks, axis labels, guides
    const char* grid;
    const char* series[kColors];
};

const Palette& palette(Theme theme);

inline constexpr const char* kFontFamily =
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
inline constexpr double kTitleSize = 16;
inline constexpr double kTextSize = 13;

/// Returns declarations such as "--plot-ink: #...; --plot-c0: #...;" for a rule of the page.
std::string css_variables(Theme theme);

/// Returns the rules of the classes that a drawing uses; they read the variables.
std::string css_rules();

}  // namespace tessera::plot
