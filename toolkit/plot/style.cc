// SPDX-License-Identifier: Apache-2.0
#include "plot/style.hpp"

#include <fmt/format.h>

namespace tessera::plot {
namespace {

constexpr Palette kLight{"#ffffff",
                         "#1b1f24",
                         "#57606a",
                         "#e3e7eb",
                         {"#1673b9", "#c44e00", "#027450", "#a3397b", "#674a00", "#605ad5", "#4b4d52"}};
constexpr Palette kDark{"#15181c",
                        "#eceff2",
                        "#a3acb5",
                        "#2c3238",
                        {"#74caff", "#ff8f50", "#35bf8f", "#e48dc6", "#e3b72f", "#9da2ff", "#c5cacf"}};

}  // namespace

const Palette& palette(Theme theme) { return theme == Theme::light ? kLight : kDark; }

std::string css_variables(Theme theme) {
    const Palette& p = palette(theme);
    std::string text = fmt::format("--plot-surface:{};--plot-ink:{};--plot-quiet:{};--plot-grid:{};", p.surface, p.ink,
                                   p.quiet, p.grid);
    for (int i = 0; i < kColors; ++i) text += fmt::format("--plot-c{}:{};", i, p.series[i]);
    return text;
}

std::string css_rules() {
    std::string text =
        ".plot-surface{fill:var(--plot-surface)}.plot-ink{fill:var(--plot-ink)}"
        ".plot-quiet{fill:var(--plot-quiet)}.plot-grid{stroke:var(--plot-grid)}"
        ".plot-axis{stroke:var(--plot-quiet)}.plot-halo{stroke:var(--plot-surface)}";
    for (int i = 0; i < kColors; ++i) text += fmt::format(".plot-c{0}{{color:var(--plot-c{0})}}", i);
    return text;
}

}  // namespace tessera::plot
